"""Nodes of v0.0.4 from bytes straight into columns, compiled. Imported only where a file is worth compiling for.

The kernel takes and refuses exactly what protobuf does; `messages.py` does the same in Python, for small files.
Positions are addresses, and ``room`` is the address of a table of numbers and of the buffers' addresses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foretrace.formats.chakra.memory import get8, get32, get64, put8, put32, put64

# What a call of `decode_nodes` ends with.
END, WANTS_BYTES, BROKEN_FRAME, FULL, WANTS_STRINGS, WANTS_TEXT = range(6)

# Places in the table at ``room``: what is used and what was met, the sizes of the buffers, and where they lie.
NODES, CONTROL, DATA, ATTRIBUTES, STRINGS, UNKNOWN, EMPTY, BAD, FIRST_BAD, HAS_IO, HAS_DOC = range(0, 88, 8)
MAX_NODES, MAX_CONTROL, MAX_DATA, MAX_ATTRIBUTES, MAX_STRINGS, MAX_TEXT, SLOT_MASK = range(88, 144, 8)
(
    ID, NAME, TYPE, START, DURATION, IO, NUM_CONTROL, NUM_DATA, NUM_ATTRIBUTES, CONTROL_IDS, DATA_IDS,
    ATTRIBUTE_NAME, WIRE, VALUE, DOC, SLOTS, HASHES, KINDS, FIRST, TEXT, NEXT_KEY, LAST_KEY,
) = range(144, 320, 8)  # fmt: skip
ROOM_WORDS = 40

# Kinds of interned bytes.
TEXT_KIND, BYTES_KIND, LIST_KIND = 0, 1, 2

# What a part of a message may give in place of the address behind it.
_MALFORMED, _NO_ROOM, _NO_STRING_ROOM, _NO_TEXT_ROOM = -1, -2, -3, -4
_MULTIPLIER = -0x61C8864680B583EB  # 2^64 over the golden ratio, as signed


@njit(cache=True, nogil=True)
def _intern(room: int, at: int, end: int, kind: int) -> int:
    """The number of these bytes among the strings, which they join when they are new; or a code below 0.

    A slot of the hash table holds the upper half of a hash, and below it a string's number + 1 and its kind; 0 is
    free. Words are loaded whole: there are 8 bytes more behind the block and behind the text.
    """
    size = end - at
    mixed = (size + kind) * _MULTIPLIER
    place = at
    while place + 8 <= end:
        mixed = (mixed ^ get64(place)) * _MULTIPLIER
        mixed ^= mixed >> 32
        place += 8
    rest = (1 << (8 * (end - place))) - 1
    tail = get64(place) & rest
    mixed = (mixed ^ tail) * _MULTIPLIER
    mixed ^= mixed >> 29
    mask, slots, first, text = get64(room + SLOT_MASK), get64(room + SLOTS), get64(room + FIRST), get64(room + TEXT)
    slot = mixed & mask
    while True:
        entry = get64(slots + 8 * slot)
        if entry == 0:
            break
        if (entry ^ mixed) >> 32 == 0 and entry & 3 == kind:
            known = ((entry & 0xFFFFFFFF) >> 2) - 1
            other = get64(first + 8 * known)
            if get64(first + 8 * known + 8) - other == size:
                other, place = text + other, at
                while place + 8 <= end and get64(place) == get64(other):
                    place += 8
                    other += 8
                if place + 8 > end and get64(other) & rest == tail:
                    return known
        slot = (slot + 1) & mask
    new = get64(room + STRINGS)
    begin = get64(first + 8 * new)
    if new == get64(room + MAX_STRINGS):
        return _NO_STRING_ROOM
    if begin + size > get64(room + MAX_TEXT):
        return _NO_TEXT_ROOM
    other = text + begin
    for offset in range(0, size, 8):
        put64(other + offset, get64(at + offset))
    put64(slots + 8 * slot, (mixed & -0x100000000) | ((new + 1) << 2) | kind)
    put64(get64(room + HASHES) + 8 * new, mixed)
    put8(get64(room + KINDS) + new, kind)
    put64(first + 8 * new + 8, begin + size)
    put64(room + STRINGS, new + 1)
    return new


@njit(cache=True, nogil=True)
def _is_string(room: int, string: int, at: int, end: int) -> bool:
    """Whether the text ``string`` consists of these bytes."""
    if get64(room + STRINGS) == 0:
        return False
    place = get64(room + FIRST) + 8 * string
    other = get64(place)
    if get64(place + 8) - other != end - at or get8(get64(room + KINDS) + string) != TEXT_KIND:
        return False
    other += get64(room + TEXT)
    while at + 8 <= end:
        if get64(at) != get64(other):
            return False
        at += 8
        other += 8
    return (get64(at) ^ get64(other)) & ((1 << (8 * (end - at))) - 1) == 0


@njit(cache=True, nogil=True)
def rehash(slots: NDArray[np.int64], hashes: NDArray[np.int64], kinds: NDArray[np.uint8], count: int) -> None:
    """Enter the first ``count`` strings into empty ``slots`` (all 0, a power of two)."""
    mask = len(slots) - 1
    for string in range(count):
        slot = hashes[string] & mask
        while slots[slot] != 0:
            slot = (slot + 1) & mask
        slots[slot] = (hashes[string] & -0x100000000) | ((string + 1) << 2) | np.int64(kinds[string])


@njit(cache=True, nogil=True)
def _long_varint(at: int, stop: int) -> Any:
    """The number at ``at`` (its lowest 64 bits) and the address behind it, -1 if it does not end before ``stop``."""
    value, shift = 0, 0
    while at < stop:
        byte = get8(at)
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
    return value, _MALFORMED


@njit(cache=True, nogil=True)
def _skip_group(at: int, end: int, tag: int) -> int:
    """The address behind a group, which no Chakra file has but protobuf allows; -1 if it is malformed."""
    open_groups = np.empty(100, np.int64)
    depth = 0
    while tag >> 3:
        wire = tag & 7
        if wire == 3 and depth < len(open_groups):
            open_groups[depth] = tag >> 3
            depth += 1
        elif wire == 4 and depth > 0 and open_groups[depth - 1] == tag >> 3:
            depth -= 1
            if depth == 0:
                return at
        elif wire == 0:
            _, at = _long_varint(at, min(end, at + 10))
        elif wire == 2:
            size, at = _long_varint(at, min(end, at + 5))
            if at >= 0:
                at = at + size if size <= end - at else _MALFORMED
        elif wire == 1 or wire == 5:
            at += 8 if wire == 1 else 4
        else:
            break
        if at < 0 or at > end:
            break
        tag, at = _long_varint(at, min(end, at + 5))
        if at < 0 or tag > 0xFFFFFFFF:
            break
    return _MALFORMED


@njit(cache=True, nogil=True)
def _field(at: int, end: int) -> Any:
    """The next field of a message: its tag, its number if it has one, and the addresses of its content and its end.

    The content of a length-delimited field begins behind its length. The end is -1 where the field is malformed.
    """
    tag = get8(at)
    at += 1
    if tag >= 0x80:
        tag, at = _long_varint(at - 1, min(end, at + 4))
        if at < 0 or tag > 0xFFFFFFFF:
            return tag, 0, at, _MALFORMED
    kind = tag & 7
    number = 0
    if kind == 0 or kind == 2:
        if at == end:
            return tag, 0, at, _MALFORMED
        number = get8(at)
        at += 1
        if number >= 0x80:
            number, at = _long_varint(at - 1, min(end, at + (9 if kind == 0 else 4)))
            if at < 0:
                return tag, 0, at, _MALFORMED
        if kind == 0:
            return (tag, number, at, at) if tag > 7 else (tag, number, at, _MALFORMED)
    elif kind == 1:
        number = 8
    elif kind == 5:
        number = 4
    else:
        return tag, 0, at, _skip_group(at, end, tag)
    if number > end - at or tag < 8:
        return tag, 0, at, _MALFORMED
    return tag, number, at, at + number


@njit(cache=True, nogil=True)
def _check_list(room: int, at: int, end: int, field: int) -> bool:
    """Whether protobuf takes a list message, the one of the attribute's field ``field``; unknown fields are counted."""
    width, kind = 0, 0  # bytes and wire type of an element
    if field == 4 or field == 22 or field == 26:
        width, kind = 8, 1
    elif field == 6 or field == 20 or field == 24:
        width, kind = 4, 5
    elif field >= 30:
        kind = 2
    while at < end:
        tag, size, start, at = _field(at, end)
        if at < 0:
            return False
        if tag == 10 and kind != 2:
            if width > 0 and size % width:
                return False
            while width == 0 and start < at:
                _, start = _long_varint(start, min(at, start + 10))
                if start < 0:
                    return False
        elif tag != 8 + kind:
            put64(room + UNKNOWN, get64(room + UNKNOWN) + 1)
    return True


@njit(cache=True, nogil=True)
def _io(room: int, at: int, end: int, row: int) -> int:
    """An IOInfo: its three texts into the three numbers at ``row``."""
    while at < end:
        tag, _, start, at = _field(at, end)
        if at < 0:
            return at
        if tag == 10 or tag == 18 or tag == 26:
            string = -1
            if at > start:
                string = _intern(room, start, at, TEXT_KIND)
                if string < 0:
                    return string
                put64(room + HAS_IO, 1)
            put32(row + 4 * ((tag >> 3) - 1), string)
        else:
            put64(room + UNKNOWN, get64(room + UNKNOWN) + 1)
    return at


@njit(cache=True, nogil=True)
def _attribute(room: int, begin: int, end: int) -> int:
    """An AttributeProto into the next row of the attribute columns; a float stays the bits of its 32."""
    at = begin
    wire, value = 0, 0
    in_list = 0  # unknown fields of the list, which do not count if another value takes its place
    key_start, key_end, doc_start, doc_end, text_start, text_end = begin, begin, begin, begin, begin, begin
    while at < end:
        tag, number = get8(at), get8(at + 1)
        kind, start = tag & 7, at + 2
        if 8 <= tag < 0x80 and number < 0x80 and (kind == 0 or kind == 2) and start + (number if kind else 0) <= end:
            at = start + (number if kind else 0)  # what most fields are: two bytes and a content
        else:
            tag, number, start, at = _field(at, end)
            if at < 0:
                return _MALFORMED
        field, kind = tag >> 3, tag & 7
        if tag == 10:
            key_start, key_end = start, at
        elif kind == 0 and field & 1 and (7 <= field <= 17 or field == 27):
            wire, value = field, number
            if field == 7:
                value = ((number & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
            elif field == 11:
                value = number & 0xFFFFFFFF
            elif field == 15:
                value = ((number & 0xFFFFFFFF) >> 1) ^ -(number & 1)
            elif field == 17:
                value = ((number >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(number & 1)
            elif field == 27 and number != 0:
                value = 1
        elif kind == 2 and (field == 29 or field == 31):
            wire, text_start, text_end = field, start, at
        elif tag == 18:
            doc_start, doc_end = start, at
        elif kind == 2 and field & 1 == 0 and field <= 32:
            unknown = get64(room + UNKNOWN) - (in_list if wire != field else 0)
            put64(room + UNKNOWN, unknown)
            if not _check_list(room, start, at, field):
                return _MALFORMED
            wire, in_list = field, get64(room + UNKNOWN) - unknown + (in_list if wire == field else 0)
        elif kind == 1 and (field == 3 or field == 21 or field == 25):
            wire, value = field, get64(start)
        elif kind == 5 and (field == 5 or field == 19 or field == 23):
            wire, value = field, get32(start)
            if field == 19:
                value &= 0xFFFFFFFF
        else:
            put64(room + UNKNOWN, get64(room + UNKNOWN) + 1)
    if in_list > 0 and (wire & 1 or wire == 0):
        put64(room + UNKNOWN, get64(room + UNKNOWN) - in_list)
    row = get64(room + ATTRIBUTES)
    if row == get64(room + MAX_ATTRIBUTES):
        return _NO_ROOM
    # The key that followed the last key before is mostly the one that follows it now.
    last = get64(room + LAST_KEY)
    key = get32(get64(room + NEXT_KEY) + 4 * last)
    if not _is_string(room, key, key_start, key_end):
        key = _intern(room, key_start, key_end, TEXT_KIND)
        if key < 0:
            return key
        put32(get64(room + NEXT_KEY) + 4 * last, key)
    put64(room + LAST_KEY, key)
    doc = -1
    if doc_end > doc_start:
        doc = _intern(room, doc_start, doc_end, TEXT_KIND)
        if doc < 0:
            return doc
        put64(room + HAS_DOC, 1)
    if wire >= 29 or (wire & 1 == 0 and wire > 0):
        what = TEXT_KIND if wire == 29 else BYTES_KIND if wire == 31 else LIST_KIND
        if what == LIST_KIND:  # kept as its whole attribute, which protobuf parses, once for all equal ones
            text_start, text_end = begin, end
        value = _intern(room, text_start, text_end, what)
        if value < 0:
            return value
    put32(get64(room + ATTRIBUTE_NAME) + 4 * row, key)
    put8(get64(room + WIRE) + row, wire)
    put64(get64(room + VALUE) + 8 * row, value)
    put32(get64(room + DOC) + 4 * row, doc)
    put64(room + ATTRIBUTES, row + 1)
    return end


@njit(cache=True, nogil=True)
def _node(room: int, begin: int, end: int, node: int) -> int:
    """One Node into row ``node`` of the buffers; the address behind it, or a code below 0."""
    identity, kind_of_node, start_micros, duration_micros = 0, 0, 0, 0
    io = get64(room + IO) + 24 * node
    put64(io, -1)
    put64(io + 8, -1)
    put64(io + 16, -1)
    name_start, name_end = begin, begin
    at = begin
    while at < end:
        tag, number = get8(at), get8(at + 1)
        kind, start = tag & 7, at + 2
        if 8 <= tag < 0x80 and number < 0x80 and (kind == 0 or kind == 2) and start + (number if kind else 0) <= end:
            at = start + (number if kind else 0)  # what most fields are: two bytes and a content
        else:
            tag, number, start, at = _field(at, end)
            if at < 0:
                return _MALFORMED
        if tag == 82:
            at = _attribute(room, start, at)
            if at < 0:
                return at
        elif tag == 8:
            identity = number
        elif tag == 18:
            name_start, name_end = start, at
        elif tag == 24:
            kind_of_node = number
        elif tag == 56:
            duration_micros = number
        elif tag == 48:
            start_micros = number
        elif tag == 66 or tag == 74:
            at = _io(room, start, at, io + (12 if tag == 74 else 0))
            if at < 0:
                return at
        elif tag == 42 or tag == 34 or tag == 40 or tag == 32:
            used, most, ids = room + DATA, get64(room + MAX_DATA), get64(room + DATA_IDS)
            if tag < 40:
                used, most, ids = room + CONTROL, get64(room + MAX_CONTROL), get64(room + CONTROL_IDS)
            row = get64(used)
            if tag & 7 == 0:
                if row == most:
                    return _NO_ROOM
                put64(ids + 8 * row, number)
                row += 1
            while start < at:
                number = get8(start)
                start += 1
                if number >= 0x80:
                    number, start = _long_varint(start - 1, min(at, start + 9))
                    if start < 0:
                        return _MALFORMED
                if row == most:
                    return _NO_ROOM
                put64(ids + 8 * row, number)
                row += 1
            put64(used, row)
        else:
            put64(room + UNKNOWN, get64(room + UNKNOWN) + 1)
    name = _intern(room, name_start, name_end, TEXT_KIND)
    if name < 0:
        return name
    put64(get64(room + ID) + 8 * node, identity)
    put32(get64(room + NAME) + 4 * node, name)
    put32(get64(room + TYPE) + 4 * node, kind_of_node)
    put64(get64(room + START) + 8 * node, start_micros)
    put64(get64(room + DURATION) + 8 * node, duration_micros)
    return at


@njit(cache=True, nogil=True)
def decode_nodes(room: int, begin: int, end: int) -> Any:
    """Decode the frames from ``begin`` on, until the bytes or the room end.

    A message that is malformed leaves no row and is counted.

    Returns:
        Why it ended (`END`, `WANTS_BYTES`, ...) and the address behind the last frame that was taken.
    """
    at = begin
    while True:
        if at == end:
            return END, at
        size, start = get8(at), at + 1
        if size >= 0x80:
            size, start = _long_varint(at, min(end, at + 5))
            if start < 0:
                return (BROKEN_FRAME if end - at >= 5 else WANTS_BYTES), at
        if size > 0x7FFFFFFF:
            return BROKEN_FRAME, at
        if size > end - start:
            return WANTS_BYTES, at
        if size == 0:
            put64(room + EMPTY, get64(room + EMPTY) + 1)
            at = start
            continue
        node = get64(room + NODES)
        if node == get64(room + MAX_NODES):
            return FULL, at
        control, data, attributes = get64(room + CONTROL), get64(room + DATA), get64(room + ATTRIBUTES)
        unknown = get64(room + UNKNOWN)
        result = _node(room, start, start + size, node)
        if result >= 0:
            put32(get64(room + NUM_CONTROL) + 4 * node, get64(room + CONTROL) - control)
            put32(get64(room + NUM_DATA) + 4 * node, get64(room + DATA) - data)
            put32(get64(room + NUM_ATTRIBUTES) + 4 * node, get64(room + ATTRIBUTES) - attributes)
            put64(room + NODES, node + 1)
            at = start + size
            continue
        put64(room + CONTROL, control)
        put64(room + DATA, data)
        put64(room + ATTRIBUTES, attributes)
        put64(room + UNKNOWN, unknown)
        if result != _MALFORMED:
            return (FULL if result == _NO_ROOM else WANTS_STRINGS if result == _NO_STRING_ROOM else WANTS_TEXT), at
        put64(room + BAD, get64(room + BAD) + 1)
        if get64(room + FIRST_BAD) == 0:
            put64(room + FIRST_BAD, at)
        at = start + size
