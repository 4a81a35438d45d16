"""The error of a script that cannot be captured."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """A script that cannot be captured. The message is one line; ``details`` holds the script's traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
