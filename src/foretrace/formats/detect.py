"""What kind of trace a file holds, told by how it begins."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from foretrace.trace import FormatError

_HEAD_BYTES = 1 << 20
_KEYS = (
    ("kineto", re.compile(rb'"traceEvents"\s*:')),
    ("chakra-json", re.compile(rb'"workload_graph"\s*:')),
    ("pytorch-et", re.compile(rb'"nodes"\s*:\s*\[')),
)


def detect(path: str | Path) -> str:
    """``kineto``, ``pytorch-et``, ``chakra``, ``chakra-json`` or ``arrow``; gzip is looked into.

    Raises:
        FormatError: if there is no such file, or it is none of these.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
        except zlib.error as error:
            raise FormatError(str(path), f"damaged gzip file ({error})", "get the file again") from None
    if head.startswith(b"ARROW1"):
        return "arrow"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith((b"{", b"[")):
        found = [(match.start(), kind) for kind, key in _KEYS if (match := key.search(text))]
        if found:
            return min(found)[1]
        # A bare list of events; what chakra_jsonizer wrote names its nodes in another way.
        is_jsonizer = re.match(rb'\{\s*("version"|"attr"|"id")\s*:', text)
        return "chakra-json" if is_jsonizer else "kineto"
    if _frames(head):
        return "chakra"
    raise FormatError(
        str(path), "is no trace of a known kind", "give a Kineto, PyTorch ET, Chakra or Arrow file (plain or gzip)"
    )


def _frames(head: bytes) -> bool:
    """Whether the bytes begin with a length and a message of that length whose first tag is one of Chakra's."""
    length = shift = at = 0
    while at < min(len(head), 5):
        byte = head[at]
        length |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            break
    else:
        return False
    # Field numbers are small: one byte with a number from 1 to 15 and a known wire type.
    is_tag = at < len(head) and 1 <= head[at] >> 3 <= 15 and (head[at] & 7) in (0, 1, 2, 5)
    return (length == 0 and len(head) > 1) or (is_tag and (at + length <= len(head) or len(head) >= _HEAD_BYTES))
