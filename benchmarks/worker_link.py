"""From loaded timelines to the graph, its simulation and critical path; everything is compiled before."""

import json
import sys
import time

import foretrace
from foretrace.estimate.reproduction import step_path
from foretrace.link import link
from foretrace.simulate import simulate

job = foretrace.read(sys.argv[1])
step_path(simulate(link(job)), job.ranks[0])
job = foretrace.read(sys.argv[1])  # nothing that the first run kept
events = sum(timeline.num_events for timeline in job)
begin = time.perf_counter()
graph = link(job)
linked = time.perf_counter()
simulation = simulate(graph)
simulated = time.perf_counter()
path = step_path(simulation, job.ranks[0])
done = time.perf_counter()
result = {"link_s": linked - begin, "simulate_s": simulated - linked, "path_s": done - simulated}
print(json.dumps({**result, "total_s": done - begin, "events": events, "tasks": graph.num_tasks}))
