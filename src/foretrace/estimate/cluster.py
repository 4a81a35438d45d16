"""From files to a simulated cluster: ETs of a job or a description of one, and the files that describe the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from foretrace.estimate.meter import Progress, meter
from foretrace.formats.chakra.read import rank_in_name
from foretrace.formats.chakra.read_many import read_workload
from foretrace.generate.description import Description, is_description, read_description
from foretrace.machine import astra
from foretrace.machine.cluster import read_cluster
from foretrace.machine.custom import files_of
from foretrace.machine.network import Network
from foretrace.machine.system import RemoteMemory, System
from foretrace.simulate.cluster import (
    ClusterSimulation,
    Conditions,
    CustomAlgorithms,
    Options,
    check_algorithm,
    simulate_fluid,
    simulate_workload,
    with_custom,
)
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


def read_own_machine(
    path: Path,
    dtype: str,
    num_ranks: int | None = None,
    groups: Path | None = None,
    injection_scale: float = 1.0,
) -> Machine:
    """Read a machine of our own description.

    Args:
        path: a YAML file, or the name of a preset.
        dtype: whose peak counts.
        num_ranks: as many devices are taken: whole nodes are added or left out, which is noted.
        groups: communicator groups.
        injection_scale: factor of the endpoint delay.

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
        network = cluster.network(notes)
    except ValueError as error:
        raise FormatError(str(path), str(error), "choose another machine or number of ranks") from None
    try:
        system = cluster.system(dtype, None, notes)
    except ValueError as error:
        problem, _, remedy = str(error).partition("; ")
        raise FormatError(str(path), problem, remedy or "choose another type") from None
    try:
        system = replace(system, endpoint_delay_ns=astra.scaled_delay(system.endpoint_delay_ns, injection_scale))
    except ValueError as error:
        problem = f"key 'collectives.endpoint_delay_ns' {error}"
        raise FormatError(str(path), problem, "make it or the injection scale smaller") from None
    members = astra.read_groups(groups, network.num_ranks, notes) if groups else None
    return Machine(network, system, cluster.memory, members, str(groups or "the groups' file"), notes)


@dataclass(frozen=True)
class JobFiles:
    """What a job is read from, looked for once.

    Attributes:
        paths: as they were given.
        files: its ETs in the order of their ranks; none for a description.
        description: of the job, in place of ETs.
    """

    paths: Sequence[Path]
    files: list[Path]
    description: Description | None = None

    @property
    def num_ranks(self) -> int | None:
        """As the files state it: one an ET, or as the description says; None for a single ET, which serves for any."""
        if self.description is not None:
            return self.description.plan.world_size
        return len(self.files) if len(self.files) > 1 else None


def find_jobs(paths: Sequence[Path], others: Sequence[Path] = ()) -> list[JobFiles]:
    """The files of a job, and of further ones on the same machine: a folder of ETs or a description each.

    Raises:
        FormatError: as `chakra_files` and `read_description`.
    """
    return [_find_job(paths), *(_find_job([path]) for path in others)]


def _find_job(paths: Sequence[Path]) -> JobFiles:
    if len(paths) == 1 and is_description(paths[0]) and not paths[0].is_dir():
        return JobFiles(paths, [], read_description(paths[0]))
    return JobFiles(paths, chakra_files(paths))


def count_ranks(jobs: Sequence[JobFiles]) -> int | None:
    """Ranks that jobs state by themselves; None for a single ET alone."""
    if len(jobs) == 1:
        return jobs[0].num_ranks
    return sum(job.num_ranks or 1 for job in jobs)


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
            _refuse_gap(rank, by_rank)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _refuse_gap(rank: int, by_rank: Mapping[int, Path]) -> NoReturn:
    """Say which file is missing, by the name of one that is there."""
    other, path = min(by_rank.items())
    before, _, behind = path.name.rpartition(str(other))
    there = _runs(sorted(by_rank))
    problem = f"the ET of rank {rank} is missing; there are ranks {there}"
    raise FormatError(str(path.with_name(f"{before}{rank}{behind}")), problem, "give one a rank, from rank 0")


def _runs(numbers: Sequence[int], most: int = 8) -> str:
    """Ascending numbers in words: 0-3, 5."""
    starts = [at for at, number in enumerate(numbers) if not at or numbers[at - 1] != number - 1]
    runs = [numbers[start:end] for start, end in pairwise([*starts, len(numbers)])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:most]]
    return ", ".join([*words, "..."] if len(runs) > most else words)


def _inside(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if path.name.endswith(_SUFFIXES)]
    except OSError as error:
        raise FormatError(str(folder), error.strerror or str(error), "check its permissions") from None
    if not found:
        raise FormatError(str(folder), "no Chakra ET in this folder", f"name files ({', '.join(_SUFFIXES)})")
    return found


def read_cluster_workload(jobs: Sequence[JobFiles], machine: Machine, progress: Progress | None = None) -> Workload:
    """The workload of jobs for a machine; the ranks of each follow those of the one before.

    Args:
        jobs: a single ET, if it is the only job, stands for every rank of the machine.
        machine: what they are to run on.
        progress: called with the bytes that were read and those that there are, again and again.

    Raises:
        FormatError: if files are missing or cannot be used.
    """
    on_bytes = meter(progress, [file for job in jobs for file in job.files])
    first, *others = jobs
    if not others:
        return _read_job(first, machine.network.num_ranks, machine.groups, machine.groups_path, on_bytes)
    parts = [_read_job(first, first.num_ranks or 1, machine.groups, machine.groups_path, on_bytes)]
    for job in others:
        parts.append(_read_job(job, job.num_ranks or 1, *_groups_beside(job.paths[0]), on_bytes))
    return merged(parts)


def _groups_beside(path: Path) -> tuple[dict[int, list[int]] | None, str]:
    """Groups of a further job: the file in its folder that `foretrace generate` writes."""
    found = path / GROUPS_FILE
    return (astra.read_groups(found), str(found)) if found.is_file() else (None, str(found))


def _read_job(
    job: JobFiles,
    num_ranks: int,
    groups: dict[int, list[int]] | None,
    groups_path: str,
    on_bytes: Callable[[int], None] | None,
) -> Workload:
    if job.description is not None:
        try:
            return job.description.workload()
        except ValueError as error:
            raise FormatError(str(job.paths[0]), str(error), "change the plan or the model") from None
    return read_workload(job.files, num_ranks, groups, groups_path, on_bytes)


def simulate_files(
    paths: Sequence[Path],
    machine: Machine,
    options: Options | None = None,
    conditions: Conditions | None = None,
    others: Sequence[Path] = (),
    progress: Progress | None = None,
) -> ClusterSimulation:
    """Simulate ETs, or what a description describes, on a machine.

    Args:
        paths: the files; a single ET stands for every rank of the machine.
        machine: what they run on.
        options: of the fidelities of ASTRA-sim.
        conditions: if given, the fluid fidelity is used, under these.
        others: further jobs; see `find_jobs`.
        progress: see `read_cluster_workload`.

    Raises:
        FormatError: where the files cannot be used, or ask for what the machine does not have.
    """
    workload = read_cluster_workload(find_jobs(paths, others), machine, progress)
    return simulate_on(machine, workload, paths, options, conditions)


def simulate_on(
    machine: Machine,
    workload: Workload,
    paths: Sequence[Path],
    options: Options | None = None,
    conditions: Conditions | None = None,
) -> ClusterSimulation:
    """As `simulate_files`, of a workload that was read from ``paths``."""
    try:
        workload = _with_custom(workload, machine.system)
        parts = workload, machine.network, machine.system, machine.memory
        return simulate_fluid(*parts, conditions) if conditions is not None else simulate_workload(*parts, options)
    except GraphError as error:
        raise _named(error, paths, workload) from None
    except MemoryError:
        problem = f"simulating {workload.num_ranks} ranks takes more memory than there is"
        raise FormatError(str(paths[0]), problem, "take fewer ranks, chunks or queues") from None


def _with_custom(workload: Workload, system: System) -> Workload:
    """The workload with the algorithms of collectives that are given as ETs."""
    if system.replay_only or not (system.custom or system.custom_nodes):
        return workload
    prefixes = {*system.custom.values(), *system.custom_nodes.values()}
    read = {prefix: read_algorithm(files_of(prefix)) for prefix in sorted(prefixes)}
    of_kind = {kind: read[prefix] for kind, prefix in system.custom.items()}
    return with_custom(workload, CustomAlgorithms(of_kind, {n: read[p] for n, p in system.custom_nodes.items()}))


def read_algorithm(files: Sequence[Path]) -> Workload:
    """The algorithm of a collective: an ET for each place in a group.

    Raises:
        FormatError: if a file cannot be read, or has anything but sends, receives and computation.
    """
    found = read_workload(files, len(files))
    try:
        check_algorithm(found)
    except GraphError as error:
        raise _named(error, files, found) from None
    return found


def _named(error: GraphError, paths: Sequence[Path], workload: Workload) -> FormatError:
    """The error with the file that it begins with, or else with the first one of the job."""
    text = str(error)
    path = next((path for path in workload.paths if text.startswith(f"{path}: ")), "")
    problem = text.removeprefix(f"{path}: ") if path else text
    return FormatError(path or str(paths[0]), problem, "change the workload or the machine's files")
