"""`record`: a joint recording of a running program, in three lines of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from foretrace.capture.collectives import Group
from foretrace.capture.job_file import claim, is_taken_over, merge, relevant_environment
from foretrace.capture.options import RUN_VARIABLE
from foretrace.capture.window import Observer, WindowResult, write_window
from foretrace.capture.windows import Action, Steps, Windows, parse_windows
from foretrace.trace import FormatError

_VERSION = importlib.metadata.version("foretrace")
_ACTIONS = {
    Action.REST: ProfilerAction.NONE,
    Action.WARM_UP: ProfilerAction.WARMUP,
    Action.RECORD: ProfilerAction.RECORD,
    Action.RECORD_LAST: ProfilerAction.RECORD_AND_SAVE,
}


def record(
    directory: str | os.PathLike[str],
    steps: Steps = None,
    warmup: int = 1,
    *,
    statistics: bool = True,
    memory: bool = True,
    stacks: bool = False,
    quiet: bool = False,
) -> Recorder:
    """Record what runs in a ``with`` block: a Kineto trace and an execution trace of one profiler session, per rank.

    ::

        with foretrace.capture.record("traces", steps="3:5") as recorder:
            for batch in data:
                train(batch)
                recorder.step()

    Args:
        directory: folder for the files; made if missing. Files of an earlier recording in it are replaced.
        steps: which steps, see `foretrace.capture.windows.parse_windows`; None for the whole block.
        warmup: steps before each window in which the profiler already runs; what it sees there is thrown away.
        statistics: note the values of integer inputs (indices, offsets).
        memory: note allocations and frees, and from them sizes of storages.
        stacks: note the Python call stack of each operator. This costs much more time.
        quiet: do not say on stderr what was recorded and what it cost.

    Raises:
        ValueError: for steps or a warm-up that make no sense.
        FormatError: if the folder cannot be made or written.
    """
    return Recorder(Path(directory), parse_windows(steps, warmup), statistics, memory, stacks, quiet)


class Recorder:
    """A recording; see `record`. Nothing that goes wrong in it is raised into the program, but all is told."""

    def __init__(
        self,
        directory: Path,
        windows: Windows,
        with_statistics: bool = True,
        with_memory: bool = True,
        with_stacks: bool = False,
        quiet: bool = False,
    ) -> None:
        self._directory = directory
        self._windows = windows
        self._quiet = quiet
        _make_folder(directory)
        self._observer = Observer(directory, with_statistics)
        self._profiler = self._new_profiler(with_memory, with_stacks)
        self._times = _StepTimes(windows)
        self._results: dict[str, WindowResult] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._groups: dict[str, Group] = {}
        self._problems: list[str] = []
        self._profiler.record_steps = False  # they are marked here, and not while another profiler has the word
        self._scope: Any = None
        self.others: set[int] = set()  # profilers that the program itself started
        self._run = ""
        self._rank = -1
        self._pid = os.getpid()
        self._state = _State()
        self._first_recorded = 0
        self._backend = ""
        self._world_size = 1

    def _new_profiler(self, memory: bool, stacks: bool) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            schedule=lambda step: _ACTIONS[self._windows.action(step)],
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=memory,
            with_stack=stacks,
            execution_trace_observer=_Started(self._observer, self._claim),  # type: ignore[arg-type]
        )

    def __enter__(self) -> Recorder:
        self._state.catch_termination(self._terminated)
        with self._state.busy():
            self._guarded("the profiler did not start", self._start)
        self._times.begin()
        return self

    @property
    def is_busy(self) -> bool:
        """Whether this recording itself is starting or stopping the profiler."""
        return self._state.is_busy

    @property
    def is_recording(self) -> bool:
        """Whether the profiler runs, or warms up."""
        return not self._state.is_over and self._windows.action(self._times.step) is not Action.REST

    def step(self) -> None:
        """Tell that a step of the program has ended."""
        if self._state.is_over or os.getpid() != self._pid:
            return
        self._times.end()
        with self._state.busy():
            self._guarded("the profiler failed", self._next_step)
        self._times.begin()

    def _start(self) -> None:
        self._refuse_beside_another(Action.REST, 0)
        self._profiler.start()
        self._open_scope()

    def _next_step(self) -> None:
        step = self._times.step
        self._refuse_beside_another(self._windows.action(step - 1), step)
        self._close_scope()
        self._profiler.step()
        self._open_scope()

    def _open_scope(self) -> None:
        """Mark a step, but only while we record: a profiler of the program has marks of its own."""
        if self._windows.action(self._times.step) is not Action.REST:
            self._scope = torch.profiler.record_function(f"ProfilerStep#{self._times.step}")
            self._scope.__enter__()

    def _close_scope(self) -> None:
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
            self._scope = None

    def _refuse_beside_another(self, before: Action, step: int) -> None:
        """PyTorch has one profiler at a time, and the program's own one comes first."""
        begins = before is Action.REST and self._windows.action(step) is not Action.REST
        if begins and (self.others or torch.autograd._profiler_enabled()):  # type: ignore[attr-defined]
            raise RuntimeError(f"another profiler is running in step {step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish("" if kind is None else f"the program raised {kind.__name__}")

    def finish(self, reason: str = "") -> None:
        """Stop, and write whole files of what was recorded until now. Only the first call does anything.

        Args:
            reason: why the program ends, where that is not by itself.
        """
        if self._state.is_over or os.getpid() != self._pid:
            return
        with self._state.busy():
            self._state.is_over = True
            self._times.drop()
            if reason:
                self._problems.append(f"{reason} in step {self._times.step}")
            self._guarded("the profiler did not stop", self._stop_profiler)
            self._guarded("job.json was not written", self._write_job)
            self._tell()
        self._state.restore_termination()

    def _stop_profiler(self) -> None:
        self._close_scope()
        self._profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._windows.ranges and not self._results:
            self._problems.append(f"no step of {self._windows} was reached: the program made {self._times.step}")

    def _terminated(self) -> None:
        self.finish("the program was terminated (SIGTERM)")

    def _guarded(self, failed: str, work: Callable[[], object]) -> None:
        """Run something that must not end the program. What fails once is not tried again."""
        try:
            work()
        except Exception as error:
            self._problems.append(f"{failed}: {error}")
            if not self._state.is_over:
                self._state.is_over = True
                self._abandon()
                self._tell()

    def _abandon(self) -> None:
        """Leave nothing running or standing in the dispatcher after a failure."""
        for work in (self._close_scope, self._observer.stop, self._observer.cleanup, self._leave_session):
            with contextlib.suppress(Exception):
                work()

    def _leave_session(self) -> None:
        if self._profiler.profiler is not None:
            self._profiler.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # Called by the profiler.

    def _claim(self) -> None:
        """When a window begins: say so in its folder, so that no other rank takes it for an old one."""
        self._first_recorded = self._times.step
        self._look_around()
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        wanted, fixed = _rank()
        self._rank = claim(folder, self._run, wanted if self._rank < 0 else self._rank, fixed)

    def _look_around(self) -> None:
        """What is known of the job; process groups come and go, so ask more than once."""
        if dist.is_available() and dist.is_initialized():
            self._world_size, self._backend = dist.get_world_size(), str(dist.get_backend_config())
        elif not self._backend:
            self._world_size = _number("WORLD_SIZE", 1)
        if not self._run:
            self._run = _run_name()

    def _folder(self) -> Path:
        return self._directory / self._windows.folder(self._first_recorded)

    def _write(self, profiler: profile) -> None:
        """The profiler has stopped: write the window's files."""
        if is_taken_over(self._folder(), self._run):
            raise RuntimeError(f"a later run records into {self._folder()}; nothing was written")
        self._look_around()
        last = self._times.step - (0 if self._times.is_within else 1)
        name = self._windows.folder(self._first_recorded)
        span = (self._first_recorded, max(last + 1, self._first_recorded + 1))
        members = {"foretrace": _VERSION, "world_size": self._world_size, "steps": list(span)}
        result = write_window(profiler, self._observer, self._folder(), self._rank, members)
        self._results[name], self._spans[name] = result, span
        self._groups |= result.groups
        self._observer.reset()
        profiler.profiler = None  # of a window that is over; the next one has its own
        self._write_job()

    # What is told.

    def _write_job(self) -> None:
        for name, result in self._results.items():
            own = {
                "host": socket.gethostname(),
                "pid": self._pid,
                "launch": os.environ.get(RUN_VARIABLE, ""),
                "device": _device(),
                "argv": sys.orig_argv,
                "environment": relevant_environment(),
                "steps": list(self._spans[name]),
                **self._times.document(self._spans[name]),
                **result.document(),
            }
            own["problems"] = result.problems + self._problems
            job = {
                "world_size": self._world_size,
                "backend": self._backend,
                "foretrace": _VERSION,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "windows": str(self._windows),
                "groups": [group.document() for group in self._groups.values()],
            }
            merge(self._directory / name, self._run, self._rank, own, job)

    def _tell(self) -> None:
        """Rank 0 says what was recorded; the others only what went wrong."""
        if self._quiet:
            return
        rank = max(self._rank, 0)
        lines = [f"rank {rank}: {problem}" for problem in self._problems]
        for name, result in self._results.items():
            if rank == 0:
                lines += _result_lines(self._directory / name, result, self._times.document(self._spans[name]))
            else:
                lines += [f"rank {rank}: {problem}" for problem in _shortfalls(result)]
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(f"foretrace: {line}\n" for line in lines))
            sys.stderr.flush()


class _Started:
    """The observer, with something to do before it starts."""

    def __init__(self, observer: Observer, before: Callable[[], None]) -> None:
        self._before = before
        self._observer = observer
        self.stop, self.cleanup = observer.stop, observer.cleanup

    def start(self) -> None:
        self._before()
        self._observer.start()


class _State:
    """Whether the recording is over, and SIGTERM: whole files are written first, then the signal has its way."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_busy = False
        self._is_pending = False
        self._previous: Any = None
        self._caught = False
        self._pid = os.getpid()
        self._on_termination: Callable[[], None] = lambda: None

    def catch_termination(self, work: Callable[[], None]) -> None:
        """Call ``work`` when SIGTERM arrives. Only the main thread may ask for that."""
        self._on_termination = work
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._arrived)
            self._caught = True

    def restore_termination(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._caught and threading.current_thread() is threading.main_thread():
            self._caught = False
            if signal.getsignal(signal.SIGTERM) == self._arrived:
                signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)

    @contextlib.contextmanager
    def busy(self) -> Any:
        """A signal that arrives in this block waits for its end: the profiler is changing its state."""
        if self.is_busy:
            yield
            return
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False
            if self._is_pending:
                self._is_pending = False
                self._arrived(signal.SIGTERM, None)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.is_busy:
            self._is_pending = True
            return
        if os.getpid() == self._pid:
            self._on_termination()
        signal.signal(number, self._previous if self._previous is not None else signal.SIG_DFL)
        self._caught = False
        os.kill(os.getpid(), number)


class _StepTimes:
    """Wall time of each step, from the end of `Recorder.step` to its next call: without starting and writing."""

    def __init__(self, windows: Windows) -> None:
        self.step = 0
        self.is_within = False
        self._windows = windows
        self._begin = 0
        self._durations: list[int] = []

    def begin(self) -> None:
        """A step begins."""
        self._begin, self.is_within = time.perf_counter_ns(), True

    def end(self) -> None:
        """The step has ended."""
        self._durations.append(time.perf_counter_ns() - self._begin)
        self.step += 1
        self.is_within = False

    def drop(self) -> None:
        """The program ends: the step that runs is none, unless the whole block is one."""
        if not self._durations and not self._windows.ranges:
            self.end()
            self.step, self.is_within = 0, True

    def document(self, span: tuple[int, int]) -> dict[str, Any]:
        """Times of recorded and other steps, and the overhead: medians of both in this run, where there are both.

        Step 0 and steps of warm-up are no measure of a step without the profiler.
        """
        durations = dict(enumerate(self._durations))
        recorded = {step: durations[step] for step in durations if span[0] <= step < span[1]}
        others = {step: durations[step] for step in durations if step > 0 and self._windows.action(step) is Action.REST}
        overhead = None
        if recorded and others:
            overhead = round(statistics.median(recorded.values()) / statistics.median(others.values()) - 1, 4)
        return {
            "recorded_step_ns": recorded,
            "unrecorded_step_ns": others,
            "overhead": overhead,
            "overhead_is": "median of recorded steps over median of steps without profiler in this run, less 1; "
            "step 0 and warm-up left out; starting the profiler and writing files not included",
        }


def _result_lines(folder: Path, result: WindowResult, times: dict[str, Any]) -> list[str]:
    recorded, others = times["recorded_step_ns"], times["unrecorded_step_ns"]
    lines = [f"wrote {', '.join(result.files.values()) or 'nothing'} to {folder} ({result.nodes:,} nodes)"]
    if times["overhead"] is not None:
        lines.append(
            f"recorded steps took {_milliseconds(recorded)} (median of {len(recorded)}), "
            f"others {_milliseconds(others)} (median of {len(others)} in this run, without step 0 and warm-up): "
            f"{times['overhead']:.1%} overhead"
        )
    elif recorded:
        lines.append(
            f"recorded steps took {_milliseconds(recorded)} (median of {len(recorded)}); "
            "overhead unknown: no step ran without the profiler"
        )
    return lines + _shortfalls(result)


def _milliseconds(times: dict[int, int]) -> str:
    return f"{statistics.median(times.values()) / 1e6:.1f} ms"


def _shortfalls(result: WindowResult) -> list[str]:
    """What could not be told."""
    lines = list(result.problems)
    for what, counts in (("collectives", result.collectives), ("calls with integer inputs", result.statistics)):
        if counts.get("not_matched"):
            lines.append(f"{counts['not_matched']} {what} found no node in the execution trace")
        if counts.get("failures"):
            lines.append(f"{counts['failures']} {what} could not be looked at")
    if result.collectives.get("nodes_without_details"):
        lines.append(f"{result.collectives['nodes_without_details']} nodes of collectives have no details")
    if result.statistics.get("left_out_for_size"):
        lines.append(f"{result.statistics['left_out_for_size']} integer inputs were not kept: too large in sum")
    return lines


def _device() -> str:
    """Name of the GPU, if the program uses one."""
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_device_name() if uses_gpu else "cpu"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FormatError(str(folder), error.strerror or str(error), "name a folder that can be made") from None
    if not os.access(folder, os.W_OK):
        raise FormatError(str(folder), "this folder cannot be written", "choose another place")


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def _rank() -> tuple[int, bool]:
    """This process's rank, and whether it is certain: without torch.distributed several processes may say 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), True
    return _number("RANK", 0), "RANK" in os.environ


def _run_name() -> str:
    """What all processes of this run have in common: through the store of the process group, else the launcher's."""
    own = os.environ.get(RUN_VARIABLE) or uuid.uuid4().hex
    if not (dist.is_available() and dist.is_initialized()):
        return own
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        return bytes(_get_default_store().compare_set("foretrace/run", "", own)).decode()
    except RuntimeError:  # a store that cannot compare, or is gone
        return own
