"""The event engine's inner loops, compiled: when each task of a graph starts.

Two loops give the same answer where both apply. `run_by_dependencies` visits tasks in any order that dependencies
allow, and is the faster one. `run_by_time` visits them in order of time, which blocking calls and lanes with
priorities need: what a call waits for depends on what has been launched at that moment.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


@njit(cache=True, nogil=True)
def run_by_dependencies(first_edge: I64, target: I32, lag: I64, duration: I64, missing: I32) -> tuple[I64, int]:
    """Starts of all tasks (negative: never started), and how many started. ``missing`` is used up.

    Args:
        first_edge: offsets into the edges of each source, shape ``(tasks + 1,)``.
        target, lag: of the edges, sorted by source.
        duration: of the tasks.
        missing: number of edges that lead to each task.
    """
    count = len(duration)
    start = np.zeros(count, np.int64)
    ready = np.empty(count, np.int32)
    waiting = 0
    for task in range(count):
        if missing[task] == 0:
            ready[waiting] = task
            waiting += 1
    done = 0
    while done < waiting:
        task = ready[done]
        done += 1
        end = start[task] + duration[task]
        for edge in range(first_edge[task], first_edge[task + 1]):
            after = target[edge]
            start[after] = max(start[after], end + lag[edge])
            missing[after] -= 1
            if missing[after] == 0:
                ready[waiting] = after
                waiting += 1
    if done < count:
        for task in range(count):
            if missing[task] > 0:
                start[task] = -1
    return start, done


@njit(cache=True, nogil=True)
def _push(time: I64, key: I64, item: I32, size: int, new_time: int, new_key: int, new_item: int) -> int:
    """Put an entry into a binary heap ordered by (time, key); gives the new size."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if time[above] < new_time or (time[above] == new_time and key[above] <= new_key):
            break
        time[at], key[at], item[at] = time[above], key[above], item[above]
        at = above
    time[at], key[at], item[at] = new_time, new_key, new_item
    return size + 1


@njit(cache=True, nogil=True)
def _drop_first(time: I64, key: I64, item: I32, size: int) -> int:
    """Take the first entry out of the heap; gives the new size."""
    size -= 1
    last_time, last_key, last_item = time[size], key[size], item[size]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        other = below + 1
        if other < size and (time[other] < time[below] or (time[other] == time[below] and key[other] < key[below])):
            below = other
        if last_time < time[below] or (last_time == time[below] and last_key <= key[below]):
            break
        time[at], key[at], item[at] = time[below], key[below], item[below]
        at = below
    time[at], key[at], item[at] = last_time, last_key, last_item
    return size


@njit(cache=True, nogil=True)
def _merge(left: I32, right: I32, rank: I32, key: I32, one: int, other: int, path: I32) -> int:
    """Merge two leftist heaps (-1 is the empty one) ordered by key; gives the root."""
    depth = 0
    while one >= 0 and other >= 0:
        if key[other] < key[one]:
            one, other = other, one
        path[depth] = one
        depth += 1
        one = right[one]
    root = one if one >= 0 else other
    for at in range(depth - 1, -1, -1):
        node = path[at]
        right[node] = root
        left_rank = rank[left[node]] if left[node] >= 0 else 0
        right_rank = rank[root] if root >= 0 else 0
        if left_rank < right_rank:
            left[node], right[node] = right[node], left[node]
            left_rank, right_rank = right_rank, left_rank
        rank[node] = right_rank + 1
        root = node
    return root


_READY, _DISPATCH, _RESOLVE = 0, 1 << 40, 2 << 40


@njit(cache=True, nogil=True)
def run_by_time(
    first_edge: I64,
    target: I32,
    lag: I64,
    duration: I64,
    missing: I32,
    lane: I32,
    has_priorities: NDArray[np.bool_],
    priority: I32,
    first_launch: I64,
    launch_work: I32,
    launch_lane: I32,
    launch_position: I32,
    first_wait: I64,
    wait_task: I32,
    wait_lane: I32,
) -> tuple[I64, I32, int]:
    """Starts of all tasks (negative: never started), what each wait waited for (-1: nothing), how many started.

    Args:
        first_edge, target, lag, duration: as `run_by_dependencies` takes them.
        missing: number of edges and waits that lead to each task; used up.
        lane, priority: of the tasks.
        has_priorities: which lanes run their ready tasks by priority.
        first_launch: offsets into ``launch_work``, ``launch_lane``, ``launch_position`` of each issuing task.
        first_wait: offsets into ``wait_task`` and ``wait_lane`` of each issuing task.
    """
    count, lanes = len(duration), len(has_priorities)
    start = np.zeros(count, np.int64)
    started = np.zeros(count, np.bool_)
    heap = count + 2 * lanes + 16  # every task is in it at most once as ready; issues once more
    heap += len(wait_task)
    time, key, item = np.empty(heap, np.int64), np.empty(heap, np.int64), np.empty(heap, np.int32)
    size = 0
    last_work, last_position = np.full(lanes, -1, np.int32), np.full(lanes, -1, np.int32)
    pending, is_dispatched, free_at = np.full(lanes, -1, np.int32), np.zeros(lanes, np.bool_), np.zeros(lanes, np.int64)
    use_heaps = has_priorities.any()
    nodes = count if use_heaps else 0
    left, right, rank = np.full(nodes, -1, np.int32), np.full(nodes, -1, np.int32), np.ones(nodes, np.int32)
    path = np.empty(nodes, np.int32)
    first_waiter = np.full(count, -1, np.int32) if len(wait_task) else np.empty(0, np.int32)
    next_waiter, source = np.full(len(wait_task), -1, np.int32), np.full(len(wait_task), -1, np.int32)
    for task in range(count):
        if missing[task] == 0:
            size = _push(time, key, item, size, 0, _READY + priority[task], task)
    done = 0
    while size > 0:
        now, what, task = time[0], key[0], item[0]
        size = _drop_first(time, key, item, size)
        if what >= _RESOLVE:
            for wait in range(first_wait[task], first_wait[task + 1]):
                work, after, until = last_work[wait_lane[wait]], wait_task[wait], now
                source[wait] = work
                if work >= 0 and not started[work]:
                    next_waiter[wait] = first_waiter[work]
                    first_waiter[work] = wait
                    continue
                if work >= 0:
                    until = max(now, start[work] + duration[work])
                start[after] = max(start[after], until)
                missing[after] -= 1
                if missing[after] == 0:
                    size = _push(time, key, item, size, start[after], _READY + priority[after], after)
            continue
        if what >= _DISPATCH:  # ``task`` is a lane here
            on = task
            task = pending[on]
            pending[on] = _merge(left, right, rank, priority, left[task], right[task], path)
            free_at[on] = now + duration[task]
            is_dispatched[on] = pending[on] >= 0
            if is_dispatched[on]:
                size = _push(time, key, item, size, free_at[on], _DISPATCH + on, on)
        elif lane[task] >= 0 and has_priorities[lane[task]]:
            on = lane[task]
            pending[on] = _merge(left, right, rank, priority, pending[on], task, path)
            if not is_dispatched[on]:
                is_dispatched[on] = True
                size = _push(time, key, item, size, max(now, free_at[on]), _DISPATCH + on, on)
            continue
        start[task] = now
        started[task] = True
        done += 1
        end = now + duration[task]
        for launch in range(first_launch[task], first_launch[task + 1]):
            on = launch_lane[launch]
            if launch_position[launch] > last_position[on]:
                last_position[on], last_work[on] = launch_position[launch], launch_work[launch]
        if first_wait[task] < first_wait[task + 1]:
            # After everything that happens at this very moment.
            size = _push(time, key, item, size, now, _RESOLVE + priority[task], task)
        for edge in range(first_edge[task], first_edge[task + 1]):
            after = target[edge]
            start[after] = max(start[after], end + lag[edge])
            missing[after] -= 1
            if missing[after] == 0:
                size = _push(time, key, item, size, start[after], _READY + priority[after], after)
        if len(first_waiter):
            wait = first_waiter[task]
            while wait >= 0:
                after = wait_task[wait]
                start[after] = max(start[after], end)
                missing[after] -= 1
                if missing[after] == 0:
                    size = _push(time, key, item, size, start[after], _READY + priority[after], after)
                wait = next_waiter[wait]
    for task in range(count):
        if not started[task]:
            start[task] = -1
    return start, source, done
