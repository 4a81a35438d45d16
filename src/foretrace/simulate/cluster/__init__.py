"""The cluster simulator: a workload on a network of many ranks, with ASTRA-sim's answers."""

from foretrace.simulate.cluster.custom import CustomAlgorithms, check_algorithm, with_custom
from foretrace.simulate.cluster.fluid import Conditions, simulate_fluid
from foretrace.simulate.cluster.lower import Options
from foretrace.simulate.cluster.simulation import ClusterSimulation, simulate_workload

__all__ = [
    "ClusterSimulation",
    "Conditions",
    "CustomAlgorithms",
    "Options",
    "check_algorithm",
    "simulate_fluid",
    "simulate_workload",
    "with_custom",
]
