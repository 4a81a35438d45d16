"""`generate`: one training step of a transformer under a parallel plan, as a `Workload` of any number of ranks."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foretrace.generate.block import Block, Slots
from foretrace.generate.layers import Shapes
from foretrace.generate.model import Transformer
from foretrace.generate.passes import Pass, PassMaker
from foretrace.generate.plan import ParallelPlan
from foretrace.generate.program import assemble
from foretrace.generate.schedule import BACKWARD, FORWARD, schedule
from foretrace.trace.strings import StringTable
from foretrace.trace.workload import WORLD, Program, WorkGroup, Workload

Granularity = Literal["operator", "layer"]
MOST_GROUPS = 2147  # ASTRA-sim's streams of a group begin at number x 1,000,000 in 32 bits


def generate(model: Transformer, plan: ParallelPlan, granularity: Granularity = "operator") -> Workload:
    """One training step.

    Ranks of a pipeline stage share a program, and so do stages with equal work in equal order. Nodes stand in the order
    in which a rank issues them. A node waits for the data that it needs and, on the stream of computation, for the node
    before it; receives wait for nothing, sends for what made their data.

    Args:
        model: what is trained.
        plan: fits the model.
        granularity: ``"operator"``: a node an operator; ``"layer"``: one node for all computation between two
            communications.

    Returns:
        The workload. Its groups are all ranks, then data-parallel groups, pairs of first and last stage (where these
        share a matrix), tensor-parallel groups and pipelines, numbered in this order.

    Raises:
        PlanError: if the plan does not fit the model.
    """
    if granularity not in ("operator", "layer"):
        raise ValueError(f"granularity {granularity!r} is neither 'operator' nor 'layer'")
    plan.check(model)
    stages = _Stages(model, plan, granularity == "layer")
    programs, program_of_stage = stages.programs()
    ranks = np.arange(plan.world_size)
    coordinates = plan.coordinates(ranks)
    program_of = program_of_stage[coordinates[:, 1]]
    groups = _Groups(model, plan)
    peers, groups_of = [], []
    for number in range(len(programs)):
        own = coordinates[program_of == number]
        peers.append(_peers(plan, own))
        groups_of.append(groups.columns(own, has_tied=stages.is_tied(int(own[0, 1]))))
    return Workload(programs, program_of, peers, groups_of, groups.all, groups.notes)


class _Stages:
    """Programs of the pipeline stages."""

    def __init__(self, model: Transformer, plan: ParallelPlan, merge: bool) -> None:
        self.model, self.plan, self.strings = model, plan, StringTable()
        self.shapes = Shapes(model, plan)
        self.maker = PassMaker(self.shapes, _slots(model, plan), self.strings, merge)
        self.blocks: list[Block] = []
        self._known: dict[object, int] = {}

    def is_tied(self, stage: int) -> bool:
        """Whether the stage shares the gradient of a tied matrix with another one."""
        return self.model.is_tied and self.plan.pp > 1 and stage in (0, self.plan.pp - 1)

    def programs(self) -> tuple[list[Program], NDArray[np.int32]]:
        """Programs, each once, and that of each stage."""
        found: dict[tuple[bytes, bytes], int] = {}
        programs: list[Program] = []
        of_stage: list[int] = []
        for stage in range(self.plan.pp):
            which, micro_batch = self._places(stage)
            number = found.setdefault((which.tobytes(), micro_batch.tobytes()), len(programs))
            if number == len(programs):
                used, places = np.unique(which, return_inverse=True)
                blocks = [self.blocks[at] for at in used.tolist()]
                programs.append(assemble(blocks, places.reshape(-1), micro_batch, self.strings))
            of_stage.append(number)
        return programs, np.array(of_stage, np.int32)

    def _places(self, stage: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The block at each place of the stage's program, and the micro-batch."""
        order = schedule(self.plan, stage)
        last = (order[:, 0] == BACKWARD) & (order[:, 2] == self.plan.micro_batches - 1)
        kinds = (order[:, 0] * self.plan.virtual_stages + order[:, 1]) * 2 + last
        _, first, place = np.unique(kinds, return_index=True, return_inverse=True)
        passes = zip(order[first, 0].tolist(), order[first, 1].tolist(), last[first].tolist(), strict=True)
        numbers = np.array([self._pass(stage, *one) for one in passes], np.int64)
        return np.append(numbers[place.reshape(-1)], self._step(stage)), np.append(order[:, 2], 0)

    def _pass(self, stage: int, direction: int, chunk: int, is_last: bool) -> int:
        """The block of a pass of a stage."""
        last_stage, last_chunk = self.plan.pp - 1, self.plan.virtual_stages - 1
        has_embedding = stage == 0 and chunk == 0
        has_head = stage == last_stage and chunk == last_chunk
        there = chunk + (stage == last_stage) if direction == FORWARD else chunk - (stage == 0)
        one = Pass(direction, chunk, has_embedding, has_head, int(there), is_last)
        if one not in self._known:
            self._known[one] = len(self.blocks)
            self.blocks.append(self.maker.block(one))
        return self._known[one]

    def _step(self, stage: int) -> int:
        """The block at the end of a stage's step."""
        is_first, has_head, last = stage == 0, stage == self.plan.pp - 1, self.plan.virtual_stages - 1
        buckets: tuple[int, ...] = ()
        for chunk in reversed(range(self.plan.virtual_stages)):
            buckets += self.shapes.buckets(is_first and chunk == 0, has_head and chunk == last)
        key = (buckets, has_head, self.is_tied(stage))
        if key not in self._known:
            self._known[key] = len(self.blocks)
            self.blocks.append(self.maker.step(*key))
        return self._known[key]


def _slots(model: Transformer, plan: ParallelPlan) -> Slots:
    tp = 0 if plan.tp > 1 else -1
    dp = tp + 1 if plan.dp > 1 else -1
    return Slots(tp, dp, max(tp, dp) + 1 if model.is_tied and plan.pp > 1 else -1)


def _peers(plan: ParallelPlan, coordinates: NDArray[np.int64]) -> NDArray[np.int32]:
    """The ranks of the stages before and after, in a circle, shape ``(ranks, 2)``; no columns for a single stage."""
    if plan.pp == 1:
        return np.empty((len(coordinates), 0), np.int32)
    strides = np.array(plan.strides)
    found = []
    for step in (-1, 1):
        there = coordinates.copy()
        there[:, 1] = (there[:, 1] + step) % plan.pp
        found.append(there @ strides)
    return np.stack(found, axis=1).astype(np.int32)


class _Groups:
    """The process groups.

    Attributes:
        all: all ranks first.
        notes: what a reader of files may stumble over.
    """

    def __init__(self, model: Transformer, plan: ParallelPlan) -> None:
        self.plan, self.slots = plan, _slots(model, plan)
        ranks = plan.ranks()
        self.all = [WorkGroup(WORLD, np.arange(plan.world_size))]
        self.first_dp = self._add(ranks.reshape(-1, plan.dp))
        ends = ranks[:, [0, -1], :].transpose(0, 2, 1) if self.slots.embedding >= 0 else np.empty((0, 2), np.int64)
        self.first_embedding = self._add(ends.reshape(-1, 2))
        self.first_tp = self._add(ranks.transpose(1, 2, 0).reshape(-1, plan.tp))
        self.notes: Counter[str] = Counter()
        if len(self.all) - 1 > MOST_GROUPS:
            self.notes["process group whose number ASTRA-sim's 32-bit stream ids do not hold (above 2147)"] = (
                len(self.all) - 1 - MOST_GROUPS
            )
        self._add(ranks.transpose(0, 2, 1).reshape(-1, plan.pp))

    def _add(self, members: NDArray[np.int64]) -> int:
        """Add groups, one a row, and give the place of the first; a group of one is none."""
        first = len(self.all)
        if members.shape[1] > 1:
            self.all += [WorkGroup(first + at, row) for at, row in enumerate(np.ascontiguousarray(members))]
        return first

    def columns(self, coordinates: NDArray[np.int64], has_tied: bool) -> NDArray[np.int32]:
        """Groups of ranks by slot, shape ``(ranks, slots)``."""
        tp, pp, dp = coordinates.T
        found = []
        if self.slots.tp >= 0:
            found.append(self.first_tp + pp * self.plan.dp + dp)
        if self.slots.dp >= 0:
            found.append(self.first_dp + tp * self.plan.pp + pp)
        if has_tied:
            found.append(self.first_embedding + tp * self.plan.dp + dp)
        return np.stack(found, axis=1).astype(np.int32) if found else np.empty((len(coordinates), 0), np.int32)
