"""The passes of a chunk of layers as blocks: forward, backward, and the end of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from foretrace.generate.block import Block, Slots
from foretrace.generate.costs import Cost
from foretrace.generate.layers import Boundary, Operator, Part, Shapes, operators
from foretrace.generate.schedule import BACKWARD, FORWARD
from foretrace.trace.strings import StringTable
from foretrace.trace.workload import CommType

PREVIOUS, NEXT = 0, 1  # columns of Workload.peers: the pipeline stages before and after, in a circle
_LOSS_BYTES = 4  # of an element of the sums in the cross entropy


@dataclass(frozen=True)
class Pass:
    """What tells the blocks of a program apart.

    Attributes:
        direction: of the pass.
        chunk: virtual stage on its rank.
        has_embedding, has_head: whether the chunk is the first, the last of the model.
        receives_as: virtual stage of the chunk on the rank that its result goes to.
        is_last: it is that of the last micro-batch, after which gradients are complete.
    """

    direction: int
    chunk: int
    has_embedding: bool
    has_head: bool
    receives_as: int
    is_last: bool


@dataclass(frozen=True)
class PassMaker:
    """Makes blocks.

    Attributes:
        shapes: the parts of the model.
        slots: of groups.
        strings: for names.
        merge: computation between two communications becomes one node.
    """

    shapes: Shapes
    slots: Slots
    strings: StringTable
    merge: bool

    def block(self, one: Pass) -> Block:
        """The block of a pass; tags are those of micro-batch 0."""
        name = "forward" if one.direction == FORWARD else "backward"
        chunk = f" c{one.chunk}" if self.shapes.plan.virtual_stages > 1 else ""
        block = Block(self.strings, f"{name}{chunk} ", self.merge)
        is_end, is_begin = (one.has_head, one.has_embedding)[:: 1 if one.direction == FORWARD else -1]
        source, target = (PREVIOUS, NEXT) if one.direction == FORWARD else (NEXT, PREVIOUS)
        size = self.shapes.sent_bytes
        if not is_begin:
            block.receive("receive", size, source, self._tag(one.direction, one.chunk))
        parts = self.shapes.parts(one.has_embedding, one.has_head)
        (_Forward if one.direction == FORWARD else _Backward)(self, block, parts, one.is_last).run()
        if not is_end:
            block.send("send", size, target, self._tag(one.direction, one.receives_as))
        return block

    def _tag(self, direction: int, chunk: int) -> int:
        """Tag of micro-batch 0 for what the given chunk receives."""
        plan = self.shapes.plan
        return (direction * plan.virtual_stages + chunk) * plan.micro_batches

    def step(self, buckets: tuple[int, ...], has_head: bool, is_tied: bool) -> Block:
        """The end of the step: gradients that are not summed yet, optimizer, weights.

        Norms are computed by all tensor-parallel ranks, with sequence parallelism each on its tokens: their gradients
        are summed then. So are those of a tied matrix between first and last stage.

        Args:
            buckets: parameters that the rank holds (before data-parallel ranks share them out), as they are reduced.
            has_head: it is the last stage.
            is_tied: it is the first or last stage of a model with a tied matrix.
        """
        block, plan, model = Block(self.strings, "step ", self.merge), self.shapes.plan, self.shapes.model
        width = plan.gradient_bytes(model)
        block.join(block.last_data)
        if plan.sequence_parallel and plan.tp > 1:
            norms = (2 * model.layers // plan.pp + has_head) * model.norm_parameters
            block.exchange("norm_gradients", CommType.ALL_REDUCE, norms * width, self.slots.tp)
        share = plan.dp if plan.zero else 1
        if is_tied:
            size = model.vocabulary // plan.tp * model.hidden * width
            block.exchange("tied_gradients", CommType.ALL_REDUCE, -(-size // share), self.slots.embedding)
        block.compute("optimizer", self.shapes.optimizer(-(-sum(buckets) // share)))
        if plan.dp > 1 and plan.zero in (1, 2):
            for size in buckets:
                own = -(-size // plan.dp) * model.dtype_bytes
                block.data("weights", CommType.ALL_GATHER, own, self.slots.dp)
        return block


class _Runner(ABC):
    """Goes through the parts of a chunk in one direction."""

    direction = FORWARD

    def __init__(self, maker: PassMaker, block: Block, parts: list[tuple[str, Part]], is_last: bool) -> None:
        self.maker, self.block, self.shapes, self.plan = maker, block, maker.shapes, maker.shapes.plan
        self.parts, self.is_last = parts, is_last

    def run(self) -> None:
        """Make the nodes; with sharded weights each part's are gathered while the part before it is computed."""
        parts = self.parts if self.direction == FORWARD else self.parts[::-1]
        gathered = self._gather(*parts[0])
        for at, (name, part) in enumerate(parts):
            following = self._gather(*parts[at + 1]) if at + 1 < len(parts) else None
            if gathered is not None:
                self.block.join(gathered)
            self.part(name, part)
            gathered = following

    @abstractmethod
    def part(self, name: str, part: Part) -> None:
        """The nodes of one part."""

    def _gather(self, name: str, part: Part) -> int | None:
        """Gather the weights of a part, if data-parallel ranks share them out."""
        if self.plan.zero < 3 or self.plan.dp == 1:
            return None
        size = sum(operator.parameters for operator in operators(part)) * self.shapes.model.dtype_bytes
        return self.block.data(f"{name}weights", CommType.ALL_GATHER, -(-size // self.plan.dp),
                               self.maker.slots.dp)  # fmt: skip

    def forward(self, name: str, part: Part) -> None:
        """The forward pass of one part."""
        for item in part:
            if isinstance(item, Operator):
                self.block.compute(name + item.name, item.forward)
            elif self.plan.tp > 1:
                self._forward_boundary(name, item)

    def _forward_boundary(self, name: str, boundary: Boundary) -> None:
        if boundary is Boundary.ENTER and self.plan.sequence_parallel:
            self.all_gather(f"{name}all_gather")
        elif boundary is Boundary.LEAVE:
            self.reduce(name)
        elif boundary is Boundary.LOSS:
            size, slot = self.shapes.tokens * _LOSS_BYTES, self.maker.slots.tp
            self.block.exchange("largest_logit", CommType.ALL_REDUCE, size, slot)
            self.block.exchange("sums", CommType.ALL_REDUCE, 2 * size, slot)

    def reduce(self, name: str) -> None:
        """Sum the partial results of the tensor-parallel ranks, each keeping its tokens with sequence parallelism."""
        kind = CommType.REDUCE_SCATTER if self.plan.sequence_parallel else CommType.ALL_REDUCE
        self.block.exchange(name + kind.label, kind, self.shapes.activation_bytes, self.maker.slots.tp)

    def all_gather(self, name: str) -> None:
        """Gather the tokens of all tensor-parallel ranks."""
        self.block.exchange(name, CommType.ALL_GATHER, self.shapes.sent_bytes, self.maker.slots.tp)


class _Forward(_Runner):
    direction = FORWARD

    def part(self, name: str, part: Part) -> None:
        self.forward(name, part)


class _Backward(_Runner):
    """The backward pass: gradients of inputs and weights, and the reduction of the latter over data-parallel ranks."""

    direction = BACKWARD
    waiting = 0  # elements of gradients that are not reduced yet

    def run(self) -> None:
        super().run()
        self._reduce_gradients()

    def part(self, name: str, part: Part) -> None:
        if self.plan.recompute == "full" and Boundary.ENTER in part and Boundary.LEAVE in part:
            self.forward(f"{name}again ", part)
        is_repeated = self.plan.recompute != "selective"
        for at in reversed(range(len(part))):
            item = part[at]
            if isinstance(item, Boundary):
                self._backward_boundary(name, item)
                continue
            if item.is_attention and not is_repeated:
                is_repeated = True
                for one in operators(part):
                    if one.is_attention:
                        self.block.compute(f"{name}again {one.name}", one.forward)
            enters = at > 0 and part[at - 1] is Boundary.ENTER and self.plan.tp > 1
            (self._entering if enters else self._operator)(name, item)
        if self.plan.zero == 3:
            self._reduce_gradients()

    def _operator(self, name: str, item: Operator) -> None:
        if item.input_gradient != Cost():
            self.block.compute(f"{name}{item.name} gradient", item.input_gradient)
        if item.weight_gradient != Cost():
            self.block.compute(f"{name}{item.name} weight_gradient", item.weight_gradient)
        self._gradients(item)

    def _entering(self, name: str, item: Operator) -> None:
        """The product behind `Boundary.ENTER`.

        The gradient of its input is summed over the ranks while that of its weights is computed. With sequence
        parallelism, the input was not kept, and is gathered again beside the gradient of the input (arXiv 2205.05198,
        section 4.2.2).
        """
        block, slot, size = self.block, self.maker.slots.tp, self.shapes.activation_bytes
        again = None
        if self.plan.sequence_parallel:
            again = block.collective(f"{name}input", CommType.ALL_GATHER, self.shapes.sent_bytes, slot)
        block.compute(f"{name}{item.name} gradient", item.input_gradient)
        kind = CommType.REDUCE_SCATTER if self.plan.sequence_parallel else CommType.ALL_REDUCE
        row = block.collective(f"{name}{kind.label}", kind, size, slot)
        if again is not None:
            block.join(again)
        block.compute(f"{name}{item.name} weight_gradient", item.weight_gradient)
        self._gradients(item)
        block.join(row)

    def _backward_boundary(self, name: str, boundary: Boundary) -> None:
        """`Boundary.ENTER` belongs to the product behind it."""
        if boundary is Boundary.LEAVE and self.plan.sequence_parallel and self.plan.tp > 1:
            self.all_gather(f"{name}all_gather")

    def _gradients(self, item: Operator) -> None:
        """Count gradients of weights, and reduce them when there are enough."""
        self.waiting += item.parameters
        enough = self.plan.bucket_bytes / self.plan.gradient_bytes(self.shapes.model)
        if self.plan.zero < 3 and self.waiting >= enough:
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        size, self.waiting = self.waiting * self.plan.gradient_bytes(self.shapes.model), 0
        is_due = self.is_last or self.plan.zero >= 2
        if size and is_due and self.plan.dp > 1:
            kind = CommType.REDUCE_SCATTER if self.plan.zero else CommType.ALL_REDUCE
            self.block.data("gradients", kind, size, self.maker.slots.dp)
