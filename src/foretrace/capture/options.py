"""Options of a recording on their way from the launcher to the processes that are recorded."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "FORETRACE_CAPTURE"
RUN_VARIABLE = "FORETRACE_RUN"  # what all processes of one launch have in common


@dataclass(frozen=True)
class Options:
    """What ``foretrace capture`` was told; see `foretrace.capture.record`."""

    output: str
    steps: str = "3:5"
    warmup: int = 1
    statistics: bool = True
    memory: bool = True
    stacks: bool = False

    def to_text(self) -> str:
        """As the value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Options:
        """The options of the launcher that this process runs under."""
        return cls(**json.loads(os.environ[VARIABLE]))
