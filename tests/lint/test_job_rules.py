"""Rules between ranks: sends and receives, lists of groups, sequences of collectives."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foretrace.formats.chakra.job_rules import Communication, check_job
from tests.lint.builders import Node, build, collective, message

Found = dict[str, dict[str, int]]


def compare(*ranks: list[Node], groups: Any = None, first: int = 0) -> tuple[Found, Counter[str]]:
    """Findings by file and rule, and notes, of ranks ``first``, ``first + 1``, ..."""
    metadata = [{"process_groups": json.dumps(one)} if one else {} for one in groups or [None] * len(ranks)]
    traces = [
        build(nodes, rank, f"x.{rank}.et", metadata=told)
        for rank, (nodes, told) in enumerate(zip(ranks, metadata, strict=True), first)
    ]
    findings, notes = check_job([Communication.of(trace) for trace in traces])
    return {path: {one.rule.name: one.count for one in of} for path, of in findings.items()}, notes


def collectives(*told: tuple[int, int] | tuple[int, int, str]) -> list[Node]:
    return [collective(Node(at), *one) for at, one in enumerate(told)]


# -- messages ----------------------------------------------------------------------------------------------------------

ONE = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.integers(1, 3))  # source, target, tag, size


def ranks_of(sends: list[tuple[int, ...]], receives: list[tuple[int, ...]]) -> list[list[Node]]:
    ranks: list[list[Node]] = [[], [], []]
    for source, target, tag, size in sends:
        ranks[source].append(message(Node(len(ranks[source])), source, target, size, tag, sends=True))
    for source, target, tag, size in receives:
        ranks[target].append(message(Node(len(ranks[target])), source, target, size, tag, sends=False))
    return ranks


def twin(sends: list[tuple[int, ...]], receives: list[tuple[int, ...]]) -> Found:
    """The same in plain Python: equal sizes cancel out, then what is left of a (source, target, tag)."""
    left = Counter(sends) - Counter(receives), Counter(receives) - Counter(sends)
    found: dict[str, Counter[str]] = {}
    by_key = [Counter(), Counter()]  # type: list[Counter[tuple[int, ...]]]
    for side in (0, 1):
        for one, count in left[side].items():
            by_key[side][one[:3]] += count
    for key in by_key[0] | by_key[1]:
        pairs = min(by_key[0][key], by_key[1][key])
        for rank, rule, count in (
            (key[0], "message-size-differs", pairs),
            (key[0], "unpaired-send", by_key[0][key] - pairs),
            (key[1], "unpaired-recv", by_key[1][key] - pairs),
        ):
            found.setdefault(f"x.{rank}.et", Counter())[rule] += count
    return {path: dict(+counts) for path, counts in found.items() if +counts}


@given(st.lists(ONE, max_size=12), st.lists(ONE, max_size=12), st.randoms())
def test_messages_are_paired_as_a_twin_pairs_them(sends: Any, receives: Any, random: Any) -> None:
    receives = receives + random.sample(sends, len(sends) // 2)
    random.shuffle(receives)
    found, notes = compare(*ranks_of(sends, receives))
    assert found == twin(sends, receives) and notes == {}


@given(st.lists(ONE, max_size=12), st.randoms())
def test_all_messages_paired(sends: Any, random: Any) -> None:
    receives = list(sends)
    random.shuffle(receives)
    assert compare(*ranks_of(sends, receives)) == ({}, {})


def test_the_surplus_is_named() -> None:
    sends = [message(Node(at), 0, 1, sends=True) for at in range(3)]
    receives = [message(Node(at), 0, 1, sends=False) for at in range(2)]
    traces = [build(sends, 0, "x.0.et"), build(receives, 1, "x.1.et")]
    (finding,) = check_job([Communication.of(one) for one in traces])[0]["x.0.et"]
    assert finding.example == "x.0.et: node 2 'op': rank 0 to 1, tag 0, 64 bytes"


def test_a_peer_without_a_file_is_noted_only() -> None:
    nodes = [message(Node(0), 3, 7, sends=True), message(Node(1), 9, 3, sends=False)]
    found, notes = compare(nodes, first=3)
    assert found == {}
    assert notes == {"send to a rank whose file is not given": 1, "receive from a rank whose file is not given": 1}


# -- collectives -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([0, 2, 6]), st.integers(1, 9), st.sampled_from(["", "0", "3"])), max_size=8))
def test_equal_sequences(told: Any) -> None:
    assert compare(collectives(*told), collectives(*told), collectives(*told)) == ({}, {})


def test_the_odd_one_out_is_named() -> None:
    usual = [(0, 8), (2, 8), (0, 16)]
    found, _ = compare(collectives(*usual), collectives((0, 8), (6, 9), (0, 16)), collectives(*usual))
    assert found == {"x.1.et": {"divergent-collective-type": 1, "divergent-collective-size": 1}}
    found, _ = compare(collectives(*usual), collectives(*usual), collectives(*usual[:2]))
    assert found == {"x.2.et": {"collective-count-differs": 1}}


def test_where_sequences_part_is_named() -> None:
    usual = [(0, 8), (2, 8), (0, 16)]
    traces = [
        build(collectives(*told), at, f"x.{at}.et") for at, told in enumerate((usual, usual, [usual[0], usual[2]]))
    ]
    (finding,) = check_job([Communication.of(one) for one in traces])[0]["x.2.et"]
    assert "2 collectives of group '0' here, 3 on rank 0; they part at number 1, node 1" in finding.example


def test_each_group_has_its_own_sequence() -> None:
    left, right = (0, 8, "1"), (0, 9, "2")
    assert compare(collectives(left, right), collectives(right, left)) == ({}, {})
    found, _ = compare(collectives(left, (0, 8)), collectives(right))
    assert found == {"x.1.et": {"collective-count-differs": 1}}  # of all ranks; the others are used by one rank each


def test_sequence_numbers_come_before_ids() -> None:
    swapped = collectives((2, 4), (0, 8))
    for node, number in zip(swapped, (1, 0), strict=True):
        node.attributes.append(("comm_sequence", 9, number))
    plain = collectives((0, 8), (2, 4))
    assert compare(swapped, plain)[0] == {}


def test_groups_that_files_list() -> None:
    lists = [[{"pg_name": "1", "ranks": ranks}] for ranks in ([0, 1], [1, 0], [0, 2])]
    found, _ = compare([], [], [], groups=lists)
    assert found == {"x.2.et": {"group-disagrees": 1}}
    # A member that issues nothing, and one whose file is not given.
    told = [[{"pg_name": "1", "ranks": [0, 1, 5]}]] * 2
    found, notes = compare(collectives((0, 8, "1")), [], groups=told)
    assert found == {"x.1.et": {"collective-count-differs": 1}}
    assert notes == {"process group of which some ranks' files are not given": 1}


def test_ranks_that_are_not_known() -> None:
    lone = build(collectives((0, 8)), -1, "x.et")
    findings, notes = check_job([Communication.of(lone), Communication.of(build(collectives((0, 9)), 0, "x.0.et"))])
    assert findings == {} and notes == {"file whose name tells no rank: not compared with others": 1}
