"""A job of any size in one process: every process group is PyTorch's fake one, whatever back end was asked for."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretrace.capture.fake.report import FakeReport

Replace = Callable[[Any, str, Any], Any]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group of the job, whether or not this rank is in it."""

    name: str
    description: str
    ranks: tuple[int, ...]


class Groups:
    """All groups that the program made, in order."""

    def __init__(self) -> None:
        self.all: list[Group] = []

    def own(self, rank: int) -> list[Group]:
        """The groups that a rank is in."""
        return [group for group in self.all if rank in group.ranks]


def patch(replace: Replace, groups: Groups, report: FakeReport, mail: Mail) -> None:
    """Redirect ``torch.distributed`` to groups without peers.

    Args:
        replace: ``replace(owner, name, value)`` sets an attribute and returns what was there.
        groups: where groups are noted.
        report: counts what is made up.
        mail: what ranks tell each other as objects.
    """
    _patch_creation(replace, groups, report)
    _patch_meshes(replace)
    _patch_objects(replace, report, mail)
    _patch_pipelining(replace)


def _everywhere(replace: Replace, name: str, value: Any) -> None:
    """Replace a function of ``torch.distributed`` wherever it was imported to by name."""
    old = getattr(distributed_c10d, name)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.distributed") and getattr(module, name, None) is old:
            replace(module, name, value)


def _patch_creation(replace: Replace, groups: Groups, report: FakeReport) -> None:
    old_init, old_new = distributed_c10d.init_process_group, distributed_c10d._new_group_with_tag

    def init_process_group(backend: Any = None, *_: Any, **told: Any) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for name, wanted, given in (("rank", told.get("rank"), rank), ("world size", told.get("world_size"), size)):
            if wanted not in (None, -1, given):
                report.note(f"{name} {wanted} of init_process_group: taken as {given}")
        report.note(f"process group of back end {backend or 'default'}: fake")
        old_init("fake", rank=rank, world_size=size, store=FakeStore(), group_name=told.get("group_name", ""))
        groups.all.append(Group(distributed_c10d._get_default_group().group_name, "default_pg", tuple(range(size))))

    def new_group_with_tag(ranks: Any = None, *args: Any, **told: Any) -> Any:
        members = tuple(range(dist.get_world_size())) if ranks is None else tuple(sorted(ranks))
        name = str(distributed_c10d._world.group_count)
        told.update(backend="fake", backend_options=None, device_id=None)
        group = old_new(ranks, *args[:1], **told)
        if isinstance(group, dist.ProcessGroup):
            name = group.group_name
        groups.all.append(Group(name, told.get("group_desc") or "undefined", members))
        return group

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *_: Any, **told: Any) -> Any:
        parent = distributed_c10d.get_process_group_ranks(parent_pg)
        own = None
        for members in split_ranks:
            group = dist.new_group([parent[member] for member in members], group_desc=told.get("group_desc"))
            own = group if isinstance(group, dist.ProcessGroup) else own
        return own

    _everywhere(replace, "init_process_group", init_process_group)
    _everywhere(replace, "_new_group_with_tag", new_group_with_tag)
    _everywhere(replace, "split_group", split_group)


def _patch_meshes(replace: Replace) -> None:
    """Coordinates of ranks are real data: they are worked out outside the fake mode."""
    mesh = device_mesh.DeviceMesh
    for name in (
        "__init__",
        "__getitem__",
        "_concatenate",
        "_flatten",
        "_unflatten",
        "_get_all_submeshes",
        "get_group",
    ):
        if hasattr(mesh, name):
            replace(mesh, name, _outside(mesh.__dict__[name]))
    if "mesh" in mesh.__dict__:
        replace(mesh, "mesh", property(_outside(mesh.__dict__["mesh"].fget)))
    _everywhere_mesh(replace)


def _everywhere_mesh(replace: Replace) -> None:
    old = device_mesh.init_device_mesh
    new = _outside(old)
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.startswith("torch.distributed") and getattr(module, "init_device_mesh", None) is old:
            replace(module, "init_device_mesh", new)


def _outside(function: Any) -> Any:
    if isinstance(function, staticmethod):
        return staticmethod(_outside(function.__func__))

    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


class Mail:
    """Objects that ranks send to each other, as files of a folder that all ranks share.

    A rank that needs an object of a rank that was not started asks for it, and waits.
    """

    def __init__(self, folder: Path, rank: int, ask: Callable[[int], None], go_on: Callable[[], None]) -> None:
        self._folder = folder
        self._rank = rank
        self._ask = ask
        self._go_on = go_on
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def send(self, receiver: str, objects: Sequence[Any]) -> None:
        """Post a list of objects. ``receiver`` is a rank, or a name that all receivers know."""
        count = self._sent[receiver] = self._sent.get(receiver, -1) + 1
        path = self._path(self._rank, receiver, count)
        with unset_fake_temporarily():
            content = pickle.dumps(list(objects))
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.rename(path)

    def receive(self, sender: int, receiver: str) -> list[Any]:
        """The next list of objects that ``sender`` posted to ``receiver``; waits for it."""
        key = f"{sender} {receiver}"
        count = self._received[key] = self._received.get(key, -1) + 1
        path = self._path(sender, receiver, count)
        if not path.exists():
            self._ask(sender)
            while not path.exists():
                time.sleep(0.005)
            self._go_on()
        with unset_fake_temporarily():
            objects: list[Any] = pickle.loads(path.read_bytes())
        return objects

    def _path(self, sender: int, receiver: str, count: int) -> Path:
        return self._folder / f"{sender}-{receiver}-{count}"


def _patch_objects(replace: Replace, report: FakeReport, mail: Mail) -> None:
    def rank_of(group: Any, rank: int | None, place: int | None) -> int:
        return distributed_c10d.get_process_group_ranks(group)[place] if rank is None else rank  # type: ignore[index]

    def send_object_list(objects: Any, dst: Any = None, group: Any = None, *_: Any, **told: Any) -> None:
        mail.send(str(rank_of(group, dst, told.get("group_dst"))), objects)

    def recv_object_list(objects: Any, src: Any = None, group: Any = None, *_: Any, **told: Any) -> int:
        sender = rank_of(group, src, told.get("group_src"))
        objects[:] = mail.receive(sender, str(dist.get_rank()))
        return sender

    def broadcast_object_list(objects: Any, src: Any = None, group: Any = None, *_: Any, **told: Any) -> None:
        ranks = distributed_c10d.get_process_group_ranks(group)
        sender = ranks[told["group_src"]] if told.get("group_src") is not None else src or 0
        if sender == dist.get_rank():
            mail.send(f"group{ranks[0]}to{ranks[-1]}of{len(ranks)}", objects)
        elif dist.get_rank() in ranks:
            objects[:] = mail.receive(sender, f"group{ranks[0]}to{ranks[-1]}of{len(ranks)}")

    def all_gather_object(found: Any, own: Any, group: Any = None) -> None:
        report.invent("objects of all_gather_object: this rank's own for all")
        found[:] = [own] * dist.get_world_size(group)

    def gather_object(own: Any, found: Any = None, *_: Any, **told: Any) -> None:
        if found is not None:
            all_gather_object(found, own, told.get("group"))

    def scatter_object_list(found: Any, objects: Any = None, *_: Any, **__: Any) -> None:
        report.invent("object of scatter_object_list: None where this rank is not the source")
        found[0] = objects[dist.get_rank()] if objects else None

    for function in (
        send_object_list,
        recv_object_list,
        broadcast_object_list,
        all_gather_object,
        gather_object,
        scatter_object_list,
    ):
        _everywhere(replace, function.__name__, function)


def _patch_pipelining(replace: Replace) -> None:
    """The stages vote on whether shapes are known; the votes of the others are taken to be that of this rank."""
    with suppress(ImportError, AttributeError):
        from torch.distributed.pipelining import schedules
        from torch.distributed.pipelining._utils import InferenceMode

        old = schedules._PipelineSchedule._warmup_p2p

        def warmup_p2p(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
            old(self, stages, has_backward, p2p_done)
            for stage in stages:
                if hasattr(stage, "_inference_mode"):
                    is_dynamic = InferenceMode.needs_dynamic(stage._user_meta, has_backward)
                    stage._inference_mode = InferenceMode.DYNAMIC if is_dynamic else InferenceMode.STATIC

        replace(schedules._PipelineSchedule, "_warmup_p2p", warmup_p2p)


def environment(rank: int, world_size: int, ranks_per_node: int) -> dict[str, str]:
    """The environment variables that ``torchrun`` sets."""
    local = min(ranks_per_node, world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(-(-world_size // local)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "foretrace",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def groups_of_node(groups: Sequence[Group], rank: int) -> list[dict[str, Any]]:
    """What the node ``## process_group:init ##`` lists: the groups of one rank."""
    own = [group for group in groups if rank in group.ranks]
    return [
        {
            "pg_name": group.name,
            "pg_desc": group.description,
            "backend_config": "fake",
            "ranks": list(group.ranks),
            "group_size": len(group.ranks),
            "group_count": len(own),
        }
        for group in own
    ]
