"""One Chrome-trace event: its typed form, and how a damaged one is mended."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from foretrace.trace import ReadReport

NO_RAW = msgspec.Raw(b"")

Number = int | float | str | None


class Args(msgspec.Struct, gc=False, frozen=True):
    """The members of ``args`` that Foretrace uses; the decoder skips all others without building objects."""

    correlation: Number = -1
    external_id: Number = msgspec.field(default=-1, name="External id")
    external_id_2021: Number = msgspec.field(default=-1, name="external id")
    device: Number = -1
    stream: Number = -1
    bytes: Number = -1
    # operators
    input_shapes: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input type")
    input_strides: msgspec.Raw = msgspec.field(default=NO_RAW, name="Input Strides")
    concrete_inputs: msgspec.Raw = msgspec.field(default=NO_RAW, name="Concrete Inputs")
    sequence: Number = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Number = msgspec.field(default=-1, name="Fwd thread id")
    record_function_id: Number = msgspec.field(default=-1, name="Record function id")
    # kernels
    grid: msgspec.Raw = NO_RAW
    block: msgspec.Raw = NO_RAW
    registers: Number = msgspec.field(default=-1, name="registers per thread")
    shared_memory_bytes: Number = msgspec.field(default=-1, name="shared memory")
    blocks_per_sm: Number = msgspec.field(default=None, name="blocks per SM")
    warps_per_sm: Number = msgspec.field(default=None, name="warps per SM")
    occupancy_pct: Number = msgspec.field(default=None, name="est. achieved occupancy %")
    # collectives
    collective: Number = msgspec.field(default="", name="Collective name")
    dtype: Number = ""
    group: Number = msgspec.field(default="", name="Process Group Name")
    group_description: Number = msgspec.field(default="", name="Process Group Description")
    group_ranks: msgspec.Raw = msgspec.field(default=NO_RAW, name="Process Group Ranks")
    in_elements: Number = msgspec.field(default=-1, name="In msg nelems")
    out_elements: Number = msgspec.field(default=-1, name="Out msg nelems")
    group_size: Number = msgspec.field(default=-1, name="Group size")
    comms_id: Number = -1
    comms_id_spaced: Number = msgspec.field(default=-1, name="Comms Id")
    source_rank: Number = msgspec.field(default=-1, name="Src Rank")
    target_rank: Number = msgspec.field(default=-1, name="Dst Rank")
    # cuda_sync
    cuda_sync_kind: Number = ""
    wait_on_stream: Number = -1
    wait_on_event_record_correlation: Number = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    wait_on_event_id: Number = msgspec.field(default=-1, name="wait_on_cuda_event_id")
    # Python functions
    python_id: Number = msgspec.field(default=-1, name="Python id")
    python_parent_id: Number = msgspec.field(default=-1, name="Python parent id")
    python_module_id: Number = msgspec.field(default=-1, name="Python module id")
    # allocator instants
    device_type: Number = msgspec.field(default=-1, name="Device Type")
    device_id: Number = msgspec.field(default=-1, name="Device Id")
    size_bytes: Number = msgspec.field(default=-1, name="Bytes")
    address: Number = msgspec.field(default=-1, name="Addr")
    allocated_bytes: Number = msgspec.field(default=-1, name="Total Allocated")
    reserved_bytes: Number = msgspec.field(default=-1, name="Total Reserved")
    # metadata events
    name: Number = ""
    labels: Number = ""


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """A Chrome-trace event; times in microseconds as the file writes them."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: Any = None  # int or float; text of the number (`msgspec.Raw`) where a float cannot hold nanoseconds
    dur: int | float | None = None
    args: Args = NO_ARGS
    id: int | str = -1


class ExactEvent(Event, gc=False):
    """``ts`` as text: absolute timestamps with decimals lose nanoseconds as a float64."""

    ts: msgspec.Raw = NO_RAW


class Damaged(ValueError):
    """An event that cannot be mended."""


_RAW_ARGS = {f.encode_name: f.name for f in msgspec.structs.fields(Args) if f.type is msgspec.Raw}
_NUMBER_ARGS = {f.encode_name: f.name for f in msgspec.structs.fields(Args) if f.type is not msgspec.Raw}
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_CONTROL = re.compile(r"[\x00-\x1f]")
_CONTROL_IN_STRING = re.compile(r'"(?:[^"\\]|\\.)*[\x00-\x1f](?:[^"\\]|\\.)*"', re.DOTALL)
_CONSTANT = re.compile(r"(?<![\w\"])(?:NaN|-?Infinity)\b|(?<=[:\s,\[])-?(?:nan|inf)\b(?!\")")
_LOWER_CONSTANT = re.compile(r"(?<=[:\s,\[])(-?)(nan|inf)\b(?=\s*[,}\]])")
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_OPEN_NAME = re.compile(
    r'("name"\s*:\s*")(.*?)("\s*[,}]\s*(?:"(?:ph|cat|pid|tid|ts|dur|args|id|s|bp)"\s*:|$))', re.DOTALL
)


def loads_tolerant(raw: bytes, report: ReadReport, place: str) -> Any:
    """Decode one damaged JSON value, mending what real traces get wrong, and count each kind of repair.

    Mended are invalid UTF-8, raw control characters, illegal escapes, NaN and Infinity in any spelling,
    trailing commas and unescaped quotes inside a name.

    Raises:
        Damaged: if the value still is no JSON.
    """
    repairs: list[str] = []
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        repairs.append("invalid UTF-8")
    for mend in (None, _mend_escapes, _mend_constants, _mend_commas, _mend_quotes):
        if mend is not None:
            mended = mend(text)
            if mended == text:
                continue
            text = mended
            repairs.append(_REPAIRS[mend.__name__])
        try:
            value = json.loads(text, strict=False, parse_float=_exact)
            break
        except (ValueError, RecursionError):
            continue
    else:
        raise Damaged("not JSON")
    if _CONTROL_IN_STRING.search(text):
        repairs.append("control character in a string")
    if _CONSTANT.search(text):
        repairs.append("NaN or Infinity")
    for repair in repairs:
        report.repair(repair, place)
    return value


def _exact(text: str) -> float | Decimal:
    """A float; a Decimal where the float would lose nanoseconds of a timestamp in microseconds."""
    value = float(text)
    return Decimal(text) if 2**43 < abs(value) < math.inf else value


def _mend_escapes(text: str) -> str:
    return _BAD_ESCAPE.sub(r"\\\\", text)


def _mend_constants(text: str) -> str:
    return _LOWER_CONSTANT.sub(lambda m: m[1] + ("NaN" if m[2] == "nan" else "Infinity"), text)


def _mend_commas(text: str) -> str:
    return _TRAILING_COMMA.sub(r"\1", text)


def _mend_quotes(text: str) -> str:
    return _OPEN_NAME.sub(lambda m: m[1] + re.sub(r'(?<!\\)"', r"\\" + '"', m[2]) + m[3], text)


_REPAIRS = {
    "_mend_escapes": "invalid escape",
    "_mend_constants": "NaN or Infinity",
    "_mend_commas": "trailing comma",
    "_mend_quotes": "unescaped quote in a name",
}


def event_from(value: Any, report: ReadReport, place: str) -> Event:
    """An event out of any JSON value, dropping members whose type makes no sense.

    Raises:
        Damaged: if the value is no object, or its phase is no text.
    """
    if not isinstance(value, dict):
        raise Damaged("not an object")
    event = Event(ph=_text(value.get("ph"), ""), name=_text(value.get("name"), ""), cat=_text(value.get("cat"), ""))
    odd = 0
    for key in ("pid", "tid", "id"):
        member = value.get(key, -1)
        if isinstance(member, int | str) and not isinstance(member, bool):
            setattr(event, key, _clean(member))
        elif member is not None:
            setattr(event, key, _text(member, ""))
            odd += 1
    for key in ("ts", "dur"):
        number = _number(value.get(key))
        if number is None and value.get(key) is not None:
            odd += 1
        setattr(event, key, number if key == "ts" or number is None else float(number))
    args = value.get("args")
    if isinstance(args, dict):
        event.args, odd_args = _args_from(args)
        odd += odd_args
    elif args is not None:
        odd += 1
    report.repair("member of an unexpected type", place, odd)
    return event


def _args_from(members: dict[str, Any]) -> tuple[Args, int]:
    known: dict[str, Any] = {}
    odd = 0
    for key, member in members.items():
        if key in _NUMBER_ARGS:
            if isinstance(member, dict | list | bool):
                odd += 1
            else:
                known[_NUMBER_ARGS[key]] = float(member) if isinstance(member, Decimal) else _clean(member)
        elif key in _RAW_ARGS:
            known[_RAW_ARGS[key]] = msgspec.Raw(json.dumps(member, default=str).encode())
    return Args(**known), odd


def _number(value: Any) -> int | float | Decimal | None:
    if isinstance(value, str):
        try:
            value = _exact(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    return value


def _text(value: Any, default: str) -> str:
    if value is None:
        return default
    return str(_clean(value))


def _clean(value: Any) -> Any:
    """Text without lone surrogates, which no UTF-8 writer accepts."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode()
    return value
