"""HTA: the critical path of one step, traces loaded before."""

import json
import sys
import time

from hta.trace_analysis import TraceAnalysis

analysis = TraceAnalysis(trace_dir=sys.argv[1])
rank = min(analysis.t.traces) if hasattr(analysis.t, "traces") else 0
begin = time.perf_counter()
graph, ok = analysis.critical_path_analysis(rank=rank, annotation="ProfilerStep", instance_id=0)
print(json.dumps({"total_s": time.perf_counter() - begin, "nodes": graph.number_of_nodes(), "ok": bool(ok)}))
