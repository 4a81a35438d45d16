"""The growing call tree: open nodes on a stack, finished nodes in the order in which they end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foretrace.capture.fake.values import Encoded

FUNCTION_SCOPE, BACKWARD_SCOPE, USER_SCOPE = 0, 1, 7
ROOT_ID, THREAD_ID, GROUPS_ID = 1, 2, 3
_MAIN_THREAD = 1


@dataclass(slots=True)
class Node:
    """One node of the trace. ``details`` are further attributes, such as those of a collective."""

    id: int
    name: str
    parent: int
    record_function_id: int
    scope: int = FUNCTION_SCOPE
    sequence: int = -1
    forward_thread: int = 0
    schema: str = ""
    inputs: Encoded | None = None
    outputs: Encoded | None = None
    details: dict[str, Any] = field(default_factory=dict)


class CallTree:
    """Nodes of one thread.

    Attributes:
        finished: nodes in the order of their ends, children before parents.
        last_id: the number that was given last, to a node, tensor or storage.
        last_node: the node that began last.
    """

    def __init__(self) -> None:
        self.finished: list[Node] = []
        self.last_id = GROUPS_ID
        self.last_node = GROUPS_ID
        self._last_record = 1  # that of the node of process groups
        self._open: list[Node] = []
        # Backward functions that stand on the stack, by their place in it: they are opened and closed as operators
        # of one or the other arrive.
        self._backward: list[tuple[int, Any]] = []

    def next_id(self) -> int:
        """A number that nothing has yet."""
        self.last_id += 1
        return self.last_id

    def new(self, name: str, scope: int = FUNCTION_SCOPE) -> Node:
        """A node that begins now, under the innermost open one."""
        self._last_record += 1
        node = Node(self.next_id(), name, self._open[-1].id if self._open else THREAD_ID, self._last_record, scope)
        self.last_node = node.id
        return node

    def begin(self, name: str, scope: int = USER_SCOPE) -> Node:
        """Open a node; those that begin before its `end` are its children."""
        node = self.new(name, scope)
        self._open.append(node)
        return node

    def end(self, node: Node) -> None:
        """Close an open node, and what is still open within. Closing twice does nothing."""
        if node not in self._open:
            return
        while self._open:
            top = self._open.pop()
            if self._backward and self._backward[-1][0] == len(self._open):
                self._backward.pop()
            self.finished.append(top)
            if top is node:
                break

    def enter_backward(self, function: Any) -> None:
        """Make the autograd function that runs now (None outside a backward pass) the parent of what follows."""
        if not self._backward and function is None:
            return
        if self._backward:
            place, running = self._backward[-1]
            if running is function:
                return
            if place == len(self._open) - 1:
                self.end(self._open[-1])
                self.enter_backward(function)
                return
        if function is not None:
            node = self.begin(function.name(), BACKWARD_SCOPE)
            node.sequence = function._sequence_nr()
            node.forward_thread = _MAIN_THREAD
            self._backward.append((len(self._open) - 1, function))

    def cut(self, name: str) -> list[Node]:
        """Close all open nodes and hand out the finished ones; then open anew, the outermost under another name.

        So a step has whole nodes only, also where a block of the program spans it.
        """
        backward = {place for place, _ in self._backward}
        again = [node for place, node in enumerate(self._open) if place not in backward]
        while self._open:
            self.end(self._open[-1])
        done, self.finished = self.finished, []
        for place, node in enumerate(again):
            self.begin(node.name if place else name, node.scope)
        return done
