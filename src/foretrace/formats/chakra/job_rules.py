"""What is wrong between the ranks of a job: sends and receives, lists of groups, sequences of collectives.

Each rank's trace is boiled down to its `Communication`, so that the traces themselves need not be kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra.edges import Ints, Mask
from foretrace.formats.chakra.groups import DEFAULT_GROUPS, groups_named, groups_of
from foretrace.formats.chakra.rules import COMMUNICATION, host_calls
from foretrace.formats.chakra.trace import ChakraTrace, CommType, NodeType
from foretrace.trace.findings import Finding, Rule, by_name

DEFAULT = "0"  # how the group of all ranks is called here

RULES = by_name(
    Rule(
        "unpaired-send",
        "A send that the trace of the receiving rank has no receive for (source, target, tag, and the how-manieth): "
        "its message is never taken.",
        "Record both ranks over the same steps, or add the receive.",
    ),
    Rule(
        "unpaired-recv",
        "A receive that the trace of the sending rank has no send for: the rank waits for ever.",
        "Record both ranks over the same steps, or add the send.",
    ),
    Rule(
        "message-size-differs",
        "A send and its receive differ in comm_size. ASTRA-sim pairs equal sizes only, and both wait for ever.",
        "Correct comm_size on one of the two ranks.",
    ),
    Rule(
        "group-disagrees",
        "Ranks list different members for one process group.",
        "Correct the list; the files may be of different runs.",
    ),
    Rule(
        "collective-count-differs",
        "The ranks of a process group issue different numbers of collectives: from where they part on, each waits for "
        "another, or for ever.",
        "Record all ranks over the same steps; look at the node that is named.",
    ),
    Rule(
        "divergent-collective-type",
        "At one place in the sequence of a group's collectives, ranks issue different ones.",
        "Look at the node that is named: the ranks run different programs, or their collectives are in another order.",
    ),
    Rule(
        "divergent-collective-size",
        "At one place in the sequence of a group's collectives, ranks state different sizes. ASTRA-sim never completes "
        "such a collective (uneven all-to-all among them).",
        "Correct comm_size, or write the largest size on all ranks.",
    ),
)


@dataclass(eq=False)
class Communication:
    """The communication of one rank, in order of ids.

    Attributes:
        path, rank: of the file.
        names: of the nodes.
        groups: names of process groups, ``"0"`` for that of all ranks.
        columns: ``id``, ``type``, ``group`` (index into ``groups``), ``kind`` (comm_type), ``size``, ``source``,
            ``target``, ``tag``, ``sequence``; -1 for what a node does not say.
        listed: ranks of each group that the file lists, ``()`` for all.
    """

    path: str
    rank: int
    names: list[str]
    groups: list[str]
    columns: dict[str, NDArray[Any]]
    listed: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: ChakraTrace) -> Communication:
        """What there is in a trace."""
        rows = np.flatnonzero(np.isin(trace.nodes["type"], COMMUNICATION) & ~host_calls(trace))
        rows = rows[np.argsort(trace.nodes["id"][rows], kind="stable")]
        columns: dict[str, NDArray[Any]] = {"id": trace.nodes["id"][rows], "type": trace.nodes["type"][rows]}
        for name, attribute in (
            ("kind", "comm_type"),
            ("size", "comm_size"),
            ("source", "comm_src"),
            ("target", "comm_dst"),
            ("tag", "comm_tag"),
            ("sequence", "comm_sequence"),
        ):
            columns[name] = trace.integers(attribute)[rows]
        groups, columns["group"] = groups_named(trace, rows)
        groups = [DEFAULT if name in DEFAULT_GROUPS else name for name in groups]
        names = trace.strings.lookup(trace.nodes["name"][rows])
        return cls(trace.report.path, trace.rank, names, groups, columns, groups_of(trace))

    def text(self, row: int) -> str:
        """A node in words."""
        return f"node {self.columns['id'][row]}" + (f" {self.names[row][:60]!r}" if self.names[row] else "")

    def sequences(self) -> dict[str, NDArray[np.intp]]:
        """Rows of collectives by group, in the order in which they are issued."""
        rows = np.flatnonzero(self.columns["type"] == NodeType.COMM_COLL)
        rows = rows[np.argsort(self.columns["sequence"][rows], kind="stable")]
        group = self.columns["group"][rows]
        found = {}
        for name in dict.fromkeys(self.groups):
            mine = [at for at, other in enumerate(self.groups) if other == name]
            if len(of := rows[np.isin(group, mine)]):
                found[name] = of
        return found


def check_job(ranks: Sequence[Communication]) -> tuple[dict[str, list[Finding]], Counter[str]]:
    """Rules over all files of one job.

    Args:
        ranks: of distinct ranks; one whose rank is not known stands for itself.

    Returns:
        Findings by path, and notes: what could not be checked because files are not given.
    """
    check = _Check([one for one in ranks if one.rank >= 0])
    for one in ranks:
        if one.rank < 0 and len(one.names):
            check.notes["file whose name tells no rank: not compared with others"] += 1
    if check.ranks:
        check.messages()
        check.group_lists()
        check.collectives()
    return check.findings, +check.notes


class _Check:
    def __init__(self, ranks: list[Communication]) -> None:
        self.ranks = sorted(ranks, key=lambda one: one.rank)
        self.given = {one.rank for one in ranks}
        self.findings: dict[str, list[Finding]] = {}
        self.notes: Counter[str] = Counter()

    def _add(self, of: Communication, name: str, count: int, place: str) -> None:
        if count:
            found = Finding(RULES[name], count, f"{of.path}: {place}", False)
            self.findings.setdefault(of.path, []).append(found)

    # -- sends and receives --------------------------------------------------------------------------------------------

    def messages(self) -> None:
        """Pair each send with its receive."""
        parts = [np.flatnonzero(one.columns["type"] != NodeType.COMM_COLL) for one in self.ranks]
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        if not len(owner):
            return
        row = np.concatenate(parts)

        def column(name: str) -> Ints:
            return np.concatenate([one.columns[name][part] for one, part in zip(self.ranks, parts, strict=True)])

        own = np.array([one.rank for one in self.ranks])[owner]
        is_send = column("type") == NodeType.COMM_SEND
        source, target = np.where(is_send, own, column("source")), np.where(is_send, column("target"), own)
        other = np.where(is_send, target, source)
        is_given = np.isin(other, list(self.given))
        self.notes["send to a rank whose file is not given"] += int((is_send & ~is_given & (other >= 0)).sum())
        self.notes["receive from a rank whose file is not given"] += int((~is_send & ~is_given & (other >= 0)).sum())
        rows = np.flatnonzero(is_given)
        keys = [source, target, column("tag")]
        # Equal sizes first: messages of different sizes may overtake each other.
        left = rows[_surplus([key[rows] for key in (*keys, column("size"))], is_send[rows])]
        alone = left[_surplus([key[left] for key in keys], is_send[left])]
        differs = np.setdiff1d(left[is_send[left]], alone)
        size = column("size")
        for name, which in (
            ("unpaired-send", alone[is_send[alone]]),
            ("unpaired-recv", alone[~is_send[alone]]),
            ("message-size-differs", differs),
        ):
            for at in np.unique(owner[which]).tolist():
                mine = which[owner[which] == at]
                first = int(mine[0])
                said = f"rank {source[first]} to {target[first]}, tag {keys[2][first]}, {size[first]} bytes"
                one = self.ranks[at]
                self._add(one, name, len(mine), f"{one.text(int(row[first]))}: {said}")

    # -- groups and collectives ----------------------------------------------------------------------------------------

    def group_lists(self) -> None:
        """Members of each group, as all files list them."""
        lists: dict[str, list[tuple[Communication, tuple[int, ...]]]] = {}
        for one in self.ranks:
            for name, ranks in one.listed.items():
                if ranks:
                    lists.setdefault(name, []).append((one, ranks))
        wrong: dict[int, list[str]] = {}
        for name, told in lists.items():
            usual = Counter(ranks for _, ranks in told).most_common(1)[0][0]
            witness = next(one.rank for one, ranks in told if ranks == usual)
            for one, ranks in told:
                if ranks != usual:
                    said = f"group {name!r} is {_short(ranks)} here, and {_short(usual)} in the file of rank {witness}"
                    wrong.setdefault(one.rank, []).append(said)
        for one in self.ranks:
            places = wrong.get(one.rank, [])
            self._add(one, "group-disagrees", len(places), places[0] if places else "")

    def collectives(self) -> None:
        """Compare the sequences of each group's collectives."""
        by_rank = {one.rank: one.sequences() for one in self.ranks}
        names = dict.fromkeys(name for found in by_rank.values() for name in found)
        found: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for name in names:
            members = self._members(name, by_rank)
            if members - self.given:
                self.notes["process group of which some ranks' files are not given"] += 1
            here = [one for one in self.ranks if one.rank in members]
            if len(here) < 2:
                continue
            rows = [by_rank[one.rank].get(name, np.empty(0, np.intp)) for one in here]
            for at, rule, count, place in _compare(name, here, rows):
                found.setdefault((at, rule), []).append((count, place))
        by_number = {one.rank: one for one in self.ranks}
        for (rank, rule), told in found.items():
            self._add(by_number[rank], rule, sum(count for count, _ in told), told[0][1])

    def _members(self, name: str, by_rank: dict[int, dict[str, NDArray[np.intp]]]) -> set[int]:
        """Ranks of a group: as listed; all of them for the default one; else those that use it."""
        for one in self.ranks:
            for spelling in DEFAULT_GROUPS if name == DEFAULT else (name,):
                if one.listed.get(spelling):
                    return set(one.listed[spelling])
        if name == DEFAULT or any(name in one.listed for one in self.ranks):
            return self.given
        return {rank for rank, found in by_rank.items() if name in found}


def _short(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, ... {len(ranks)} ranks]" if len(ranks) > 8 else f"[{shown}]"


def _surplus(keys: list[Ints], is_send: Mask) -> Mask:
    """Which messages have no counterpart: of each key, those of the more frequent kind that come last."""
    count = len(is_send)
    place = np.arange(count)
    order = np.lexsort((place, *keys))
    changed = np.zeros(count, np.bool_)
    changed[:1] = True
    for key in keys:
        changed[1:] |= key[order][1:] != key[order][:-1]
    segment = np.cumsum(changed) - 1
    sends = is_send[order]
    found = np.zeros(count, np.bool_)
    for kind in (True, False):
        mine = sends == kind
        others = np.bincount(segment[~mine], minlength=count)
        before = np.cumsum(mine) - mine  # of the same kind, in all
        begin = before[np.flatnonzero(changed)][segment] if count else before
        found[order[mine]] = (before - begin)[mine] >= others[segment[mine]]
    return found


def _compare(name: str, here: list[Communication], rows: list[NDArray[np.intp]]) -> list[tuple[int, str, int, str]]:
    """Rank, rule, count and place of what differs in a group; what most ranks do is taken as right."""
    lengths = np.array([len(of) for of in rows])
    usual = int(np.sort(lengths)[len(lengths) // 2])  # of two ranks the one with more: the other was cut
    if (lengths != usual).any():
        return [
            (one.rank, "collective-count-differs", 1, _parting(name, here, rows, at, int(np.argmax(lengths == usual))))
            for at, one in enumerate(here)
            if lengths[at] != usual
        ]
    found = []
    for rule, column in (("divergent-collective-type", "kind"), ("divergent-collective-size", "size")):
        values = np.stack([one.columns[column][of] for one, of in zip(here, rows, strict=True)])
        right = np.sort(values, axis=0)[(len(here) - 1) // 2]
        for at, one in enumerate(here):
            wrong = np.flatnonzero(values[at] != right)
            if len(wrong):
                place = int(wrong[0])
                witness = here[int(np.argmax(values[:, place] == right[place]))].rank
                mine, theirs = (_value(column, int(value)) for value in (values[at, place], right[place]))
                said = f"collective {place} of group {name!r}: {mine} here, {theirs} on rank {witness}"
                found.append((one.rank, rule, len(wrong), f"{one.text(int(rows[at][place]))}: {said}"))
    return found


def _parting(name: str, here: list[Communication], rows: list[NDArray[np.intp]], at: int, witness: int) -> str:
    """Where the sequence of one rank parts from that of another, which is longer or shorter."""
    both = [(here[i].columns["kind"][rows[i]], here[i].columns["size"][rows[i]]) for i in (at, witness)]
    common = min(len(rows[at]), len(rows[witness]))
    differs = (both[0][0][:common] != both[1][0][:common]) | (both[0][1][:common] != both[1][1][:common])
    place = int(np.argmax(differs)) if differs.any() else common
    one = here[at] if place < len(rows[at]) else here[witness]
    node = one.text(int(rows[at if one is here[at] else witness][place]))
    counts = f"{len(rows[at])} collectives of group {name!r} here, {len(rows[witness])} on rank {here[witness].rank}"
    return f"{counts}; they part at number {place}, {node} of rank {one.rank}"


def _value(column: str, value: int) -> str:
    if column == "kind" and 0 <= value <= CommType.BARRIER:
        return CommType(value).name
    return str(value) if value >= 0 else "unknown"
