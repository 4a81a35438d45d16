"""Record a small training run of two ranks, one of them slow, then ask Foretrace where the time went."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def show(*command: str) -> None:
    """Print a command, then run it; stop here if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    status = subprocess.run(command, check=False, cwd=HERE.parent).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """The demo from end to end."""
    # The programs that were installed beside this Python come first.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    out = Path("demo/out")
    show("python", "demo/train.py", "--slow-rank", "1")
    traces = [str(out / f"rank{rank}.json.gz") for rank in range(2)]
    show("foretrace", "info", *traces)
    report, timeline = out / "report.html", out / "perfetto.json.gz"
    show("foretrace", "analyze", *traces, "--html", str(report), "--perfetto", str(timeline))
    print(f"\nOpen {report} in a browser, and {timeline} in the Perfetto viewer.")


if __name__ == "__main__":
    main()
