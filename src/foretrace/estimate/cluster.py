"""From files to a simulated cluster: ETs of a job or a description of one, and the files that describe the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretrace.formats.chakra.read import rank_in_name
from foretrace.formats.chakra.read_many import read_workload
from foretrace.generate.description import is_description, read_description
from foretrace.machine import astra
from foretrace.machine.cluster import read_cluster
from foretrace.machine.network import Network
from foretrace.machine.system import RemoteMemory, System
from foretrace.simulate.cluster import ClusterSimulation, Conditions, Options, simulate_fluid, simulate_workload
from foretrace.trace import FormatError, GraphError
from foretrace.trace.workload import Workload, merged

_SUFFIXES = (".et", ".et.gz")
GROUPS_FILE = "comm_groups.json"


@dataclass(frozen=True)
class Machine:
    """A machine as its files describe it.

    Attributes:
        network, system, memory: see `foretrace.machine`.
        groups: members of numbered groups, None without a file of them.
        groups_path: that file, for messages.
        notes: keys without effect, counted.
    """

    network: Network
    system: System
    memory: RemoteMemory
    groups: dict[int, list[int]] | None = None
    groups_path: str = "the groups' file"
    notes: Counter[str] = field(default_factory=Counter)


def read_machine(
    network: Path,
    system: Path,
    memory: Path | None = None,
    groups: Path | None = None,
    injection_scale: float = 1.0,
) -> Machine:
    """Read ASTRA-sim's files.

    Args:
        network, system, memory, groups: ``network.yml``, ``system.json``, remote memory and communicator groups.
        injection_scale: factor of the endpoint delay.

    Raises:
        FormatError: naming file, key and remedy.
    """
    notes: Counter[str] = Counter()
    found = astra.read_network(network, notes)
    layer = astra.read_system(system, len(found.dimensions), injection_scale, notes)
    astra.check(found, layer, system)
    remote = astra.read_memory(memory, notes) if memory else RemoteMemory()
    members = astra.read_groups(groups, found.num_ranks, notes) if groups else None
    return Machine(found, layer, remote, members, str(groups or "the groups' file"), notes)


def read_own_machine(path: Path, dtype: str, num_ranks: int | None = None, groups: Path | None = None) -> Machine:
    """Read a machine of our own description.

    Args:
        path: a YAML file, or the name of a preset.
        dtype: whose peak counts.
        num_ranks: as many devices are taken: whole nodes are added or left out, which is noted.
        groups: communicator groups.

    Raises:
        FormatError: naming file, key and remedy.
    """
    notes: Counter[str] = Counter()
    cluster = read_cluster(path)
    try:
        if num_ranks is not None and num_ranks != cluster.num_devices:
            nodes, rest = divmod(num_ranks, cluster.devices_per_node)
            if rest:
                raise ValueError(f"{num_ranks} ranks do not fill nodes of {cluster.devices_per_node} devices")
            cluster = cluster.resized(nodes)
            notes[f"nodes taken to hold {num_ranks} ranks"] = nodes
        network, system = cluster.network(notes), cluster.system(dtype, None, notes)
    except ValueError as error:
        raise FormatError(str(path), str(error), "choose another machine or number of ranks") from None
    members = astra.read_groups(groups, network.num_ranks, notes) if groups else None
    return Machine(network, system, cluster.memory, members, str(groups or "the groups' file"), notes)


def count_ranks(paths: Sequence[Path], others: Sequence[Path] = ()) -> int | None:
    """Ranks that files of one or several jobs state by themselves; None for a single ET alone.

    Raises:
        FormatError: as `chakra_files` and `read_description`.
    """
    own = _count_ranks(paths)
    if not others:
        return own
    return (own or 1) + sum(_count_ranks([path]) or 1 for path in others)


def _count_ranks(paths: Sequence[Path]) -> int | None:
    """One an ET, or as a description says; None for a single ET."""
    if _is_description(paths):
        return read_description(paths[0]).plan.world_size
    files = chakra_files(paths)
    return len(files) if len(files) > 1 else None


def _is_description(paths: Sequence[Path]) -> bool:
    return len(paths) == 1 and is_description(paths[0])


def chakra_files(paths: Sequence[Path]) -> list[Path]:
    """ETs of a job in the order of their ranks; a folder stands for the ETs in it.

    Raises:
        FormatError: if a file does not say its rank, or a rank is missing or there twice.
    """
    files = [one for path in paths for one in (_inside(path) if path.is_dir() else [path])]
    if len(files) == 1:
        return files
    by_rank: dict[int, Path] = {}
    for path in files:
        rank = rank_in_name(path.name)
        if rank < 0:
            raise FormatError(
                str(path), "its name does not say its rank", "name the files PREFIX.0.et, PREFIX.1.et, ..."
            )
        if rank in by_rank:
            raise FormatError(
                str(path), f"rank {rank} is there twice, as {by_rank[rank]} too", "give one job at a time"
            )
        by_rank[rank] = path
    for rank in range(len(by_rank)):
        if rank not in by_rank:
            raise FormatError(str(files[0].parent), f"the ET of rank {rank} is missing", "give one a rank, from rank 0")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _inside(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.name.endswith(_SUFFIXES)]
    if not found:
        raise FormatError(str(folder), "no Chakra ET in this folder", f"name files ({', '.join(_SUFFIXES)})")
    return found


def read_cluster_workload(
    paths: Sequence[Path],
    machine: Machine,
    others: Sequence[Path] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> Workload:
    """The workload of ETs for a machine, or of a description (see `read_description`).

    Args:
        paths: a single ET stands for every rank of the machine.
        machine: what they are to run on.
        others: further jobs on the same machine, a folder of ETs or a description each; their ranks follow.
        on_bytes: called with the number of bytes read, again and again.

    Raises:
        FormatError: if files are missing or cannot be used.
    """
    if not others:
        return _read_job(paths, machine.network.num_ranks, machine.groups, machine.groups_path, on_bytes)
    jobs = [paths, *([path] for path in others)]
    parts = []
    for job in jobs:
        groups, where = (machine.groups, machine.groups_path) if job is paths else _groups_beside(job[0])
        parts.append(_read_job(job, _count_ranks(job) or 1, groups, where, on_bytes))
    return merged(parts)


def _groups_beside(path: Path) -> tuple[dict[int, list[int]] | None, str]:
    """Groups of a further job: the file in its folder that `foretrace generate` writes."""
    found = path / GROUPS_FILE
    return (astra.read_groups(found), str(found)) if found.is_file() else (None, str(found))


def _read_job(
    paths: Sequence[Path],
    num_ranks: int,
    groups: dict[int, list[int]] | None,
    groups_path: str,
    on_bytes: Callable[[int], None] | None,
) -> Workload:
    if _is_description(paths):
        return read_description(paths[0]).workload()
    return read_workload(chakra_files(paths), num_ranks, groups, groups_path, on_bytes)


def simulate_files(
    paths: Sequence[Path],
    machine: Machine,
    options: Options | None = None,
    conditions: Conditions | None = None,
    others: Sequence[Path] = (),
) -> ClusterSimulation:
    """Simulate ETs, or what a description describes, on a machine.

    Args:
        paths: the files.
        machine: what they run on.
        options: of the fidelities of ASTRA-sim.
        conditions: if given, the fluid fidelity is used, under these.
        others: further jobs; see `read_cluster_workload`.

    Raises:
        FormatError: where the files cannot be used, or ask for what the machine does not have.
    """
    workload = read_cluster_workload(paths, machine, others)
    parts = workload, machine.network, machine.system, machine.memory
    try:
        return simulate_fluid(*parts, conditions) if conditions is not None else simulate_workload(*parts, options)
    except GraphError as error:
        text = str(error)
        path = next((path for path in workload.paths if text.startswith(f"{path}: ")), "")
        problem = text.removeprefix(f"{path}: ") if path else text
        raise FormatError(path or str(paths[0]), problem, "change the workload or the machine's files") from None
