"""Which ranks are alike: found from digests of a few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from foretrace.capture.fake.process_groups import Group
from foretrace.capture.fake.symmetry import Axis, axes, classify, ranges


def grid_groups(data: int, tensor: int) -> list[Group]:
    """The groups of a mesh (dp, tp), rank = dp * tensor + tp."""
    world = Group("0", "default_pg", tuple(range(data * tensor)))
    dp = [Group("", "mesh_dp", tuple(range(first, data * tensor, tensor))) for first in range(tensor)]
    tp = [Group("", "mesh_tp", tuple(range(first, first + tensor))) for first in range(0, data * tensor, tensor)]
    return [world, *dp, *tp]


def test_axes_of_a_mesh() -> None:
    found = axes(grid_groups(4, 2), 8)
    assert [axis.size for axis in found] == [4, 2]
    assert found[1].positions(8) == [0, 1] * 4


def test_axes_without_a_mesh() -> None:
    assert axes([Group("0", "default_pg", (0, 1, 2))], 3) == [Axis(((0, 1, 2),))]
    # Groups that leave ranks out, or overlap, say nothing of the whole job.
    odd = [Group("1", "a", (0, 1)), Group("2", "a", (1, 2)), Group("3", "b", (0, 3))]
    assert axes(odd, 4) == [Axis(((0, 1, 2, 3),))]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_contiguous_classes_are_found(data: list[int], tensor: list[int]) -> None:
    """Classes that are runs along each axis, no two runs alike: as uneven shards and pipeline stages are."""
    dp = list(chain.from_iterable([at] * count for at, count in enumerate(data)))
    tp = list(chain.from_iterable([at] * count for at, count in enumerate(tensor)))
    kind = [f"{a} {b}" for a in dp for b in tp]
    asked: list[int] = []

    def digests(ranks: Sequence[int]) -> list[str]:
        asked.extend(ranks)
        return [kind[rank] for rank in ranks]

    found = classify(axes(grid_groups(len(dp), len(tp)), len(kind)), len(kind), digests)
    assert found.equal_to == [kind.index(text) for text in kind]
    assert sorted(asked) == found.traced and len(set(asked)) == len(asked)
    assert not found.surprises


def test_few_ranks_are_run() -> None:
    asked: list[int] = []

    def digests(ranks: Sequence[int]) -> list[str]:
        asked.extend(ranks)
        return ["same"] * len(ranks)

    found = classify(axes(grid_groups(128, 8), 1024), 1024, digests)
    assert set(found.equal_to) == {0}
    assert sorted(asked) == [0, 3, 7, 504, 1016, 1023]


def test_a_rank_that_breaks_the_symmetry_is_told() -> None:
    found = classify([Axis(((0, 1), (2, 3))), Axis(((0, 2), (1, 3)))], 4, lambda ranks: ["ab"[r == 3] for r in ranks])
    assert found.surprises == [3] and found.equal_to == [0, 0, 0, 3]


@given(st.sets(st.integers(0, 60)))
def test_ranges_say_which(ranks: set[int]) -> None:
    said: list[int] = []
    for text in ranges(ranks):
        span, _, step = text.partition(":")
        first, _, last = span.partition("-")
        said += range(int(first), int(last or first) + 1, int(step or 1))
    assert sorted(said) == sorted(ranks) and len(said) == len(set(said))


def test_ranges_are_short() -> None:
    assert ranges(range(1, 128)) == ["1-127"]
    assert ranges(range(0, 1024, 8)) == ["0-1016:8"]
    assert ranges([0, 1, 2, 9]) == ["0-2", "9"]
