"""The event engine: an `ExecutionGraph` in, timelines out."""

from foretrace.simulate.run import Simulation, resolve, simulate

__all__ = ["Simulation", "resolve", "simulate"]
