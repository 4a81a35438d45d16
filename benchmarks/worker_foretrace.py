"""Foretrace: load a folder of ranks, then breakdown and overlap; or load it through the Arrow cache."""

import json
import resource
import sys
import time
from pathlib import Path

import pyarrow  # noqa: F401  (its import is no part of reading)

import foretrace

path, cache = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
start = time.perf_counter()
job = foretrace.read(path, cache=Path(cache) if cache else False)
loaded = time.perf_counter()
if not cache:
    foretrace.analyze.breakdown(job)
    foretrace.analyze.overlap(job)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(json.dumps({"load_s": loaded - start, "total_s": done - start, "own_peak_mb": peak, "ranks": len(job)}))
