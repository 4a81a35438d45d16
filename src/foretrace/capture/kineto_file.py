"""What we need of the Kineto file of a window: ids, threads, and scopes that were open at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from foretrace.capture.execution_trace import OpenScope


class _Arguments(msgspec.Struct):
    external: Any = msgspec.field(name="External id", default=0)
    record: Any = msgspec.field(name="Record function id", default=0)
    finished: Any = True


class _Event(msgspec.Struct):
    ph: str = ""
    cat: Any = ""
    name: Any = ""
    tid: Any = 0
    args: _Arguments | None = None


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass
class KinetoIds:
    """Attributes: ``record_of`` by external id, ``thread_of`` (the system's) by record function id, ``open``."""

    record_of: dict[int, int] = field(default_factory=dict)
    thread_of: dict[int, int] = field(default_factory=dict)
    open: list[OpenScope] = field(default_factory=list)
    problem: str = ""


def read_ids(text: bytes) -> KinetoIds:
    """Ids of the operators and annotations of a Kineto file."""
    ids = KinetoIds()
    try:
        events = msgspec.json.decode(text, type=_File).events
    except msgspec.DecodeError as error:
        ids.problem = f"the Kineto trace is no valid JSON ({error})"
        return ids
    for event in events:
        arguments = event.args
        if event.ph != "X" or arguments is None or not isinstance(arguments.record, int) or not arguments.record:
            continue
        if event.cat not in ("cpu_op", "user_annotation"):
            continue
        record, thread = arguments.record, event.tid if isinstance(event.tid, int) else -1
        ids.thread_of[record] = thread
        if isinstance(arguments.external, int):
            ids.record_of[arguments.external] = record
        if arguments.finished is False:
            ids.open.append(OpenScope(record, str(event.name), thread))
    return ids
