"""What we need of the Kineto file of a window: ids, threads, and scopes that were open at its end."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foretrace.capture.execution_trace import OpenScope

_NAME = re.compile(rb'("name": ?)"([^\n]*)"(,\s*"pid": ?)')
_END = re.compile(rb'"traceName": ?"[^"]*"(\s*\}\s*)$')


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


def mended(text: bytes, name: str) -> bytes:
    """The text with the file's own name in it, and names with quotes, which PyTorch leaves as they are, escaped.

    What cannot be mended stays as it is.
    """
    text = _END.sub(lambda found: b'"traceName": ' + json.dumps(name).encode() + found[1], text)
    if _is_json(text):
        return text
    better = _NAME.sub(
        lambda found: found[1] + json.dumps(found[2].decode("utf-8", "replace")).encode() + found[3], text
    )
    return better if _is_json(better) else text


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError:
        return False
    return True


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
