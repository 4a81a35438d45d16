"""The process that loads PyTorch and forks one process for each rank: ``python -m foretrace.capture.fake``.

Takes its orders as JSON on standard input, and answers with JSON on the file descriptor that they name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _serve() -> None:
    orders = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"job": _capture(orders)}
    except Exception as error:
        # Only what a script did wrong comes with details: its own traceback.
        answer = {"error": str(error), "details": getattr(error, "details", ""), "kind": type(error).__name__}
    with os.fdopen(orders["answer"], "w") as pipe:
        json.dump(answer, pipe)


def _capture(orders: dict[str, Any]) -> dict[str, Any]:
    from foretrace.capture.fake import job, program

    told = dict(orders["options"])
    options = program.Options(**{**told, "script": Path(told["script"]), "args": tuple(told["args"])})
    return job.capture(options, orders["ranks"], Path(orders["output"]), orders["limit"])


if __name__ == "__main__":
    _serve()
