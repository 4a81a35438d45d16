"""A Chrome-trace JSON file as a stream: its top-level members, and its events in batches.

The event list is cut between events into batches of a few MB, each decoded at once into typed structs. A cut at a
wrong place (``},{`` inside a string or a nested list) leaves text that is no list of whole objects, so decoding it
fails, and the batch takes the slow road: event by event, mending or dropping what is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from foretrace.formats import sources
from foretrace.formats.batches import Batch, BatchScanner, DecodedBatch
from foretrace.formats.chrome_events import Damaged, Event, ExactEvent, event_from, loads_tolerant
from foretrace.trace import FormatError, ReadReport, StringTable

_MAX_TAIL_BYTES = 64 << 20
_MAX_EVENT_BYTES = 64 << 20  # without an end of an event in so many bytes, the text is no event list
_SPACE = b" \t\r\n"
_SEPARATOR = re.compile(rb"\}(\s*,\s*)\{")
_BOUNDARY = re.compile(rb"\}\s*,?\s*(?=\{\s*\"[^\"\\]{1,40}\"\s*:)")
_LIST_END = re.compile(rb"\}\s*\]")
_KEY = re.compile(rb'\s*"((?:[^"\\]|\\.)*)"\s*:\s*')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
_SCALAR = re.compile(rb'(?:"(?:[^"\\]|\\.)*"|[^\s,{}\[\]"]+)(?=\s*[,}])', re.DOTALL)


class JsonStream:
    """Reads ``blocks`` once, front to back.

    Attributes:
        members: top-level members besides the events; complete when `batches` is exhausted.
    """

    def __init__(self, blocks: Iterator[bytes], path: str, report: ReadReport, strings: StringTable) -> None:
        self._blocks = blocks
        self._path = path
        self._report = report
        self._buffer = b""
        self._offset = 0  # of the buffer's first byte in the inflated file
        self._exhausted = False
        self._separator: bytes | None = None
        self._closed = False  # the end of the event list has been seen
        self.members: dict[str, Any] = {}
        self._strings = strings
        self._scanner = BatchScanner(strings, report)
        self._decoder = msgspec.json.Decoder(list[ExactEvent])

    def batches(self) -> Iterator[tuple[Batch, bytes]]:
        """Events batch by batch, each with the text it came from.

        Raises:
            FormatError: if the file is no trace at all.
        """
        if not self._find_events():
            return
        while not self._closed:
            piece, offset, last = self._next_piece()
            if piece and not piece.isspace():
                yield self._decode(piece, offset, last)
            if last:
                break
        if not self._closed:
            self._report.repair("event list is not closed: file is cut", f"byte {self._offset + len(self._buffer)}")
        self._read_tail()

    # -- top level ---------------------------------------------------------------------------------------------

    def _find_events(self) -> bool:
        """Read up to the first event; False if the file has no event list but is a trace all the same."""
        self._fill(1)
        start = self._buffer.removeprefix(b"\xef\xbb\xbf").lstrip(_SPACE)
        self._drop(len(self._buffer) - len(start))
        if not start:
            raise FormatError(self._path, "the file is empty", "record the trace again")
        if start[:1] == b"[":
            self._drop(1)
            return self._open_list()
        if start[:1] != b"{":
            raise FormatError(self._path, f"byte 0 is {start[:1]!r}, not JSON", self._not_json(start))
        self._drop(1)
        return self._read_members(until_events=True)

    def _not_json(self, start: bytes) -> str:
        if self._path.endswith(".et"):
            return "this looks like a Chakra trace; give a Kineto trace (.json or .json.gz)"
        if start[:4] in (b"PK\x03\x04", b"ARRO"):
            return "rename the archive to .zip, or load an Arrow file with foretrace.load"
        return "give a Kineto or Chrome trace (.json or .json.gz)"

    def _open_list(self) -> bool:
        while not self._buffer.lstrip(_SPACE) and self._more():
            pass
        rest = self._buffer.lstrip(_SPACE)
        if rest[:1] == b"]":
            self._drop(len(self._buffer) - len(rest) + 1)
            self._closed = True
        return True

    def _read_members(self, until_events: bool) -> bool:
        """Read ``"key": value`` pairs; stop inside ``traceEvents``. True if that was found."""
        while True:
            key, position = self._key()
            if key is None:
                break
            if until_events and key == "traceEvents" and self._peek(position) == b"[":
                self._drop(position + 1)
                return self._open_list()
            self._refuse_other_kinds(key)
            end = self._value_end(position)
            if end is None:
                self._report.drop("top-level member that is cut or damaged", f"{key!r} at byte {self._offset}")
                break
            self._keep_member(key, self._buffer[position:end])
            self._drop(end)
            self._skip_comma()
        if until_events:
            self._refuse_strangers()
        return False

    def _key(self) -> tuple[str | None, int]:
        while True:
            match = _KEY.match(self._buffer)
            if match and match.end() < len(self._buffer):
                return match[1].decode(errors="replace"), match.end()
            if self._buffer.lstrip(_SPACE)[:1] not in (b'"', b"") or len(self._buffer) > _MAX_EVENT_BYTES:
                return None, 0
            if not self._more():
                return None, 0

    def _peek(self, position: int) -> bytes:
        return self._buffer[position : position + 1]

    def _value_end(self, position: int) -> int | None:
        """Where the value at ``position`` ends; None if it never does."""
        while True:
            end = _balanced_end(self._buffer, position)
            if end is not None or len(self._buffer) > _MAX_EVENT_BYTES:
                return end
            if not self._fill(2 * len(self._buffer)):
                return None

    def _keep_member(self, key: str, raw: bytes) -> None:
        try:
            self.members[key] = json.loads(raw)
        except (ValueError, RecursionError):
            try:
                self.members[key] = loads_tolerant(raw, self._report, f"member {key!r}")
            except Damaged:
                self._report.drop("top-level member that is cut or damaged", f"{key!r} at byte {self._offset}")

    def _skip_comma(self) -> None:
        while not self._buffer.lstrip(_SPACE) and self._more():
            pass
        rest = self._buffer.lstrip(_SPACE)
        self._drop(len(self._buffer) - len(rest) + (1 if rest[:1] == b"," else 0))

    def _refuse_other_kinds(self, key: str) -> None:
        if key == "nodes" and "schema" in self.members:
            problem = f"this is a PyTorch execution trace (schema {self.members['schema']}), not a profiler trace"
            raise FormatError(self._path, problem, "give the Kineto trace of the same run")

    def _refuse_strangers(self) -> None:
        known = {"schemaVersion", "deviceProperties", "distributedInfo", "traceName", "displayTimeUnit", "metadata"}
        if not known & self.members.keys():
            found = ", ".join(list(self.members)[:5]) or "nothing readable"
            problem = f"no traceEvents list before byte {self._offset + len(self._buffer)} (top level has: {found})"
            raise FormatError(self._path, problem, "give a Kineto or Chrome trace (.json or .json.gz)")
        self._report.note("no traceEvents: the file holds metadata only")

    def _read_tail(self) -> None:
        """Members behind the event list; the rest of the file matters no more, so damage is only counted."""
        if not self._closed:
            return
        self._fill(_MAX_TAIL_BYTES)
        self._skip_comma()
        if self._buffer.lstrip(_SPACE)[:1] == b'"':
            self._read_members(until_events=False)

    # -- events ------------------------------------------------------------------------------------------------

    def _next_piece(self) -> tuple[bytes, int, bool]:
        """Text of whole events, its offset, and whether the file ends with it."""
        while True:
            if not self._fill(max(sources.BLOCK_BYTES, len(self._buffer) + 1)):
                piece, offset = self._buffer, self._offset
                self._drop(len(piece))
                return piece, offset, True
            cut = self._cut()
            if cut:
                piece, offset = self._buffer[:cut], self._offset
                self._drop(cut)
                self._drop_comma()
                return piece, offset, False
            if len(self._buffer) > _MAX_EVENT_BYTES:
                problem = f"no end of an event within {len(self._buffer) >> 20} MB from byte {self._offset}"
                raise FormatError(self._path, problem, "the file is damaged there; cut it before that byte")

    def _drop_comma(self) -> None:
        rest = self._buffer.lstrip(_SPACE)
        self._drop(len(self._buffer) - len(rest) + (1 if rest[:1] == b"," else 0))

    def _cut(self) -> int:
        """Position behind the last event that surely is whole, 0 if none is."""
        if self._separator is not None:
            at = self._buffer.rfind(self._separator)
            if at >= 0:
                return at + 1
        found = None
        for found in _SEPARATOR.finditer(self._buffer):
            if self._separator is None:
                self._separator = found[0]
                at = self._buffer.rfind(self._separator)
                return at + 1
        return found.start() + 1 if found else 0

    def _decode(self, piece: bytes, offset: int, last: bool) -> tuple[Batch, bytes]:
        if last:
            return self._decode_last(piece, offset)
        return self._read_whole(piece) or self._salvage(piece, offset, last), piece

    def _decode_last(self, piece: bytes, offset: int) -> tuple[Batch, bytes]:
        """The last piece holds the ``]`` that closes the list, and what follows it."""
        ends = [match.start() + 1 for match in _LIST_END.finditer(piece, max(0, len(piece) - (1 << 20)))]
        for end in reversed(ends[-4:]):
            rest = piece[end:].lstrip(_SPACE)[1:]
            if rest.lstrip(_SPACE)[:1] in (b"", b",", b"}"):
                batch = self._read_whole(piece[:end])
                if batch is not None:
                    self._close(offset + len(piece) - len(rest), rest)
                    return batch, piece[:end]
        return self._salvage(piece, offset, last=True), piece

    def _read_whole(self, text: bytes) -> Batch | None:
        """All events of the text at once, by the compiled scanner or else into structs; None if it is damaged."""
        scanned = self._scanner.scan(text)
        if scanned is not None:
            return scanned
        try:
            events: list[Event] = list(self._decoder.decode(b"".join((b"[", text, b"]"))))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
            return None
        return DecodedBatch(self._strings, self._report, events)

    def _close(self, offset: int, rest: bytes) -> None:
        """The list ended inside a piece: what follows it goes back to the front of the buffer."""
        self._closed = True
        self._buffer = rest + self._buffer
        self._offset = offset

    def _salvage(self, piece: bytes, offset: int, last: bool) -> Batch:
        """Decode event by event, mending what can be mended and counting what must be dropped."""
        events: list[Event] = []
        starts = [0, *(match.end() for match in _BOUNDARY.finditer(piece))]
        ends = [*(match.start() + 1 for match in _BOUNDARY.finditer(piece)), len(piece)]
        one = msgspec.json.Decoder(ExactEvent)
        index = 0
        while index < len(starts):
            used, found = self._salvage_one(piece, starts, ends, index, one, offset, events)
            if not found and self._try_close(piece, starts[index], offset, one, events):
                break
            if not found:
                at = f"byte {offset + starts[index]}"
                is_cut = last and index + 1 == len(starts)
                self._report.drop("event cut off at the end of the file" if is_cut else "damaged event", at)
            index += used
        return DecodedBatch(self._strings, self._report, events)

    def _salvage_one(
        self,
        piece: bytes,
        starts: list[int],
        ends: list[int],
        index: int,
        one: msgspec.json.Decoder[Any],
        offset: int,
        events: list[Event],
    ) -> tuple[int, bool]:
        """Append the event at ``index``; it may span up to four boundaries (nested lists of objects)."""
        place = f"byte {offset + starts[index]}"
        for used in range(1, min(4, len(starts) - index) + 1):
            raw = piece[starts[index] : ends[index + used - 1]].strip(_SPACE + b",")
            if raw[-1:] != b"}":
                continue
            event = _decode_one(raw, one)
            if event is not None:
                events.append(event)
                return used, True
        raw = piece[starts[index] : ends[index]].strip(_SPACE + b",")
        if not raw:
            return 1, True
        whole = _balanced_end(raw, 0) if raw[:1] == b"{" else None
        rest = raw[whole:].strip(_SPACE + b",") if whole else b""
        if rest and rest[:1] != b"]":  # an event, and behind it the beginning of one or something else
            event = _decode_one(raw[:whole], one)
            if event is not None:
                events.append(event)
                self._report.drop("damaged or incomplete event", f"byte {offset + starts[index] + (whole or 0)}")
                return 1, True
        if raw[:1] == b"{" and raw[-1:] == b"}":
            try:
                events.append(event_from(loads_tolerant(raw, self._report, place), self._report, place))
                return 1, True
            except Damaged:
                pass
        return 1, False

    def _try_close(
        self, piece: bytes, start: int, offset: int, one: msgspec.json.Decoder[Any], events: list[Event]
    ) -> bool:
        """Whether the event list ends inside this event's text; if so, take the event and close the list."""
        if piece[start:].lstrip(_SPACE + b",")[:1] == b"]":
            rest = piece[start:].lstrip(_SPACE + b",")[1:]
            self._close(offset + len(piece) - len(rest), rest)
            return True
        for count, match in enumerate(_LIST_END.finditer(piece, start)):
            if count == 20:
                break
            raw = piece[start : match.start() + 1].strip(_SPACE + b",")
            event = _decode_one(raw, one)
            if event is None:
                try:
                    place = f"byte {offset + start}"
                    probe = ReadReport(self._path)
                    value = loads_tolerant(raw, probe, place)
                    event = event_from(value, probe, place)
                    self._report.repaired.update(probe.repaired)
                    self._report.examples.update(probe.examples)
                except Damaged:
                    continue
            events.append(event)
            self._close(offset + match.end(), piece[match.end() :])
            return True
        return False

    # -- buffer ------------------------------------------------------------------------------------------------

    def _more(self) -> bool:
        """Append one block; False at the end of the file."""
        if self._exhausted:
            return False
        block = next(self._blocks, None)
        if block is None:
            self._exhausted = True
            return False
        self._buffer += block
        return True

    def _fill(self, size: int) -> bool:
        """Read on until the buffer holds ``size`` bytes; False if the file had nothing more."""
        grew = False
        while len(self._buffer) < size and self._more():
            grew = True
        return grew

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._offset += count


def _decode_one(raw: bytes, one: msgspec.json.Decoder[Any]) -> Event | None:
    try:
        event: Event = one.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    return event


def _balanced_end(buffer: bytes, position: int) -> int | None:
    """End of the JSON value that starts at ``position``, None if the buffer ends first."""
    if buffer[position : position + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(buffer, position)
        return scalar.end() if scalar else None
    depth = 0
    for token in _TOKEN.finditer(buffer, position):
        first = token[0][:1]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
    return None
