"""HolisticTraceAnalysis: load a folder of ranks, then breakdown and overlap. Runs in an environment of its own."""

import json
import logging
import resource
import sys
import time

logging.disable(logging.CRITICAL)

from hta.trace_analysis import TraceAnalysis  # noqa: E402

start = time.perf_counter()
analysis = TraceAnalysis(trace_dir=sys.argv[1])
loaded = time.perf_counter()
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
print(json.dumps({"load_s": loaded - start, "total_s": done - start, "own_peak_mb": peak}))
