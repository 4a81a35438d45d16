"""The cluster simulator: a workload on a network of many ranks, with ASTRA-sim's answers."""

from foretrace.simulate.cluster.fluid import Conditions, simulate_fluid
from foretrace.simulate.cluster.lower import Options
from foretrace.simulate.cluster.simulation import ClusterSimulation, simulate_workload

__all__ = ["ClusterSimulation", "Conditions", "Options", "simulate_fluid", "simulate_workload"]
