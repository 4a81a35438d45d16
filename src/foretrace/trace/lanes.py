"""Lanes: where events run. A host thread or a device stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LaneKind(enum.IntEnum):
    """What a lane is."""

    OTHER = 0
    HOST_THREAD = 1
    DEVICE_STREAM = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """One host thread or one device stream.

    Attributes:
        process: process id as the trace writes it (``"4711"``, ``"Spans"``).
        thread: thread id or stream as the trace writes it (``"4711"``, ``"stream 7"``).
        device: device number of a stream, -1 on the host.
        stream: stream number, -1 on the host. Stream 0 is valid (ROCm uses it).
        name: the thread's name where the trace gives one.
    """

    kind: LaneKind
    process: str
    thread: str
    device: int = -1
    stream: int = -1
    name: str = ""

    @property
    def label(self) -> str:
        """A short name for tables and pictures."""
        if self.kind is LaneKind.DEVICE_STREAM:
            return f"device {self.device} stream {self.stream}"
        return self.name or f"thread {self.thread}"
