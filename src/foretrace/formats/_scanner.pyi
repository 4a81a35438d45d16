"""The compiled scanner of trace events; see the head of ``_scanner.c``."""

class Scanner:
    """Scans the JSON text of whole events into columns."""

    def __init__(self, event_fields: list[tuple[str, int]], args_fields: list[tuple[str, int]], /) -> None: ...
    def scan(self, text: bytes, /) -> tuple[int, list[tuple[bytes, bytes]], bytes, list[bytes]] | None:
        """(number of events, (rows, values) of each field, odd values, new tokens), or None."""
