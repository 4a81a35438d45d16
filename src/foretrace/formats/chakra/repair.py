"""`repair`: a Chakra trace without the faults that can be mended. No duration, size or type is invented."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foretrace.formats.chakra import rules
from foretrace.formats.chakra.builder import narrow
from foretrace.formats.chakra.edges import Edges, without
from foretrace.formats.chakra.trace import ChakraTrace, NodeType, Wire
from foretrace.trace import Table
from foretrace.trace.findings import DAMAGED


def repair(trace: ChakraTrace) -> tuple[ChakraTrace, Counter[str]]:
    """Mend what can be mended; see `foretrace.formats.chakra.rules` for what each repair does.

    Returns:
        A new trace that shares what did not change, and how many repairs were made, by rule. ``cycle`` counts the
        dependencies that were cut.
    """
    done: Counter[str] = Counter()
    if damaged := sum((trace.report.repaired + trace.report.dropped).values()):
        done[DAMAGED.name] = damaged  # writing the file anew is the repair
    trace = _without_repeated(trace, done)
    trace = _with_integers(trace, done)
    trace = _host_calls_as_compute(trace, done)
    trace = _without_impossible(trace, done)
    trace = _with_distinct_ids(trace, done)
    trace = _without_cycles(trace, done)
    return trace, +done


def _without_repeated(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    repeated = rules.repeated_attributes(trace)
    done["repeated-attribute"] = int(repeated.sum())
    return replace(trace, attributes=trace.attributes.take(~repeated)) if repeated.any() else trace


def _with_integers(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    """Whole numbers of other types as int64."""
    table = trace.attributes
    wire, value = table["wire"].copy(), table["value"].copy()
    for row in rules.wrong_integers(trace).tolist():
        number = rules.whole_number(trace.value(row))
        if number is not None:
            wire[row], value[row] = Wire.INT64, number
            done["attribute-not-integer"] += 1
    narrower = rules.narrow_integers(trace)
    wire[narrower] = Wire.INT64
    done["attribute-not-int64"] = len(narrower)
    if not done["attribute-not-integer"] and not len(narrower):
        return trace
    return replace(trace, attributes=Table({**table, "wire": wire, "value": value}, table.strings))


def _host_calls_as_compute(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    calls = rules.host_calls(trace)
    done["host-collective"] = int(calls.sum())
    return _with_column(trace, "type", np.where(calls, NodeType.COMP, trace.nodes["type"])) if calls.any() else trace


def _without_impossible(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    """Without dependencies on absent nodes and on oneself."""
    lists = []
    for kind in Edges(trace).kinds:
        done["dangling-dependency"] += int(kind.is_dangling.sum())
        done["self-dependency"] += int(kind.is_self.sum())
        lists.append(without(kind.lists, kind.is_dangling | kind.is_self))
    return replace(trace, data=lists[0], control=lists[1])


def _with_distinct_ids(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    """All nodes of one id but the first get new ones, above all others as long as there are such."""
    ids = trace.nodes["id"]
    order = np.argsort(ids, kind="stable")
    twins = np.sort(order[1:][ids[order][1:] == ids[order][:-1]])
    if not len(twins):
        return trace
    done["duplicate-id"] = len(twins)
    top = int(ids.max())
    if top + len(twins) < 1 << 64:
        fresh = np.uint64(top) + np.arange(1, len(twins) + 1, dtype=np.uint64)
    else:
        fresh = np.setdiff1d(np.arange(trace.num_nodes + len(twins), dtype=np.uint64), ids)[: len(twins)]
    renumbered = ids.copy()
    renumbered[twins] = fresh
    return _with_column(trace, "id", renumbered)


def _without_cycles(trace: ChakraTrace, done: Counter[str]) -> ChakraTrace:
    edges = Edges(trace)
    if not len(edges.source) or not _has_cycle(edges):
        return trace
    from foretrace.formats.chakra.cycles import edges_to_cut, order_of

    source, target, data = edges.source, edges.target, edges.is_data
    cut = np.zeros(len(source), np.bool_)
    # Data alone first: then their order says which control dependencies go backward.
    cut[data] = edges_to_cut(source[data], target[data], edges.priority)
    kept = data & ~cut
    position = order_of(source[kept], target[kept], edges.priority)
    left = np.flatnonzero(~cut)
    cut[left[edges_to_cut(source[left], target[left], position)]] = True
    done["cycle"] = int(cut.sum())
    lists = [without(kind.lists, mask) for kind, mask in zip(edges.kinds, edges.drop_masks(cut), strict=True)]
    return replace(trace, data=lists[0], control=lists[1])


def _has_cycle(edges: Edges) -> bool:
    return bool((np.bincount(edges.component, minlength=edges.count) > 1).any())


def _with_column(trace: ChakraTrace, name: str, column: NDArray[np.integer]) -> ChakraTrace:
    column = column if name == "id" else narrow(column)
    return replace(trace, nodes=Table({**trace.nodes, name: column}, trace.nodes.strings))
