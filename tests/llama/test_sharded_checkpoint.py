"""Checkpoints of a training run: whole or not there, and loaded by any layout of ranks."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretrace.llama.checkpoint import sharded
from foretrace.llama.checkpoint.sharded import Checkpointer, TrainingState, latest, load
from foretrace.llama.model import Llama
from foretrace.trace.reading import FormatError
from tests.llama.checkpoints import config_of, model_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(steps: int, seed: int = 0) -> tuple[Llama, torch.optim.Optimizer]:
    model = model_of(config_of(layers=1), seed)
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = torch.randint(3, 512, (2, 9))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return loss.item()


def tensors(folder: Path, step: int = 1, fill: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((64, 8), fill), "progress": {"step": step, "rates": [0.1, 0.2], "name": "a"}}


def empty() -> dict[str, Any]:
    return {"weight": torch.zeros(64, 8), "progress": {"step": 0, "rates": [0.0, 0.0], "name": ""}}


@pytest.mark.parametrize("is_async", [False, True])
def test_training_goes_on_as_if_never_stopped(tmp_path: Path, is_async: bool) -> None:
    model, optimizer = trained(3)
    with Checkpointer(tmp_path) as checkpoints:
        progress = {"step": 3, "rng": torch.get_rng_state()}
        state = {"training": TrainingState(model, optimizer), "progress": progress}
        (checkpoints.save_async if is_async else checkpoints.save)(3, state)
        expected = train(model, optimizer, 3)  # while it is being written
    again, its_optimizer = trained(1, seed=5)
    with Checkpointer(tmp_path) as checkpoints:
        progress = {"step": 0, "rng": torch.zeros_like(torch.get_rng_state())}
        found = checkpoints.load_latest({"training": TrainingState(again, its_optimizer), "progress": progress})
    assert (found.step, found.refused) == (3, {})
    assert progress["step"] == 3
    torch.set_rng_state(progress["rng"])
    assert train(again, its_optimizer, 3) == expected
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [group["weight_decay"] for group in its_optimizer.param_groups] == [0.1, 0.0]


def test_plain_values_and_tensors_come_back(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        saved = checkpoints.save(7, tensors(tmp_path, 7))
    assert saved == tmp_path / "step-00000007"
    state = empty()
    load(saved, state)
    assert torch.equal(state["weight"], torch.ones(64, 8))
    assert state["progress"] == {"step": 7, "rates": [0.1, 0.2], "name": "a"}


def test_compiled_models_are_saved_under_their_own_names(tmp_path: Path) -> None:
    """Mistake 16: epfml/llm-baselines#13."""
    model, optimizer = trained(1)
    compiled = torch.compile(model, backend="eager")
    names = TrainingState(compiled, optimizer).state_dict()["model"]
    assert names.keys() == dict(model.named_parameters()).keys()


def test_some_stay_and_the_older_go(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save_async(step, tensors(tmp_path, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(4, tensors(tmp_path, 4))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_that_went_back_is_not_overtaken_by_what_it_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(10, tensors(tmp_path, 10))
        checkpoints.save(10, tensors(tmp_path, 10, fill=2.0))
        assert latest(tmp_path).folder == tmp_path / "step-00000010.1"
        checkpoints.save(5, tensors(tmp_path, 5))
        assert latest(tmp_path).step == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set-aside.step-00000010.1", "step-00000005"]


def damages(folder: Path) -> dict[str, Any]:
    shard, index, manifest = folder / "__0_0.distcp", folder / ".metadata", folder / "manifest.json"

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return {
        "__0_0.distcp: has": lambda: cut(shard), "__0_0.distcp: is damaged": lambda: flip(shard),
        "__0_0.distcp: is missing": shard.unlink, ".metadata: has": lambda: cut(index),
        ".metadata: is damaged": lambda: flip(index), "manifest.json: is no JSON": lambda: cut(manifest),
        "manifest.json: No such file": manifest.unlink, "manifest.json: lists no": lambda: manifest.write_text("{}"),
    }  # fmt: skip


@pytest.mark.parametrize("damage", damages(Path()))
def test_damaged_ones_are_refused_by_name_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tensors(tmp_path, step, fill=float(step)))
    damages(tmp_path / "step-00000002")[damage]()
    state = empty()
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.load_latest(state)
    assert (found.step, state["progress"]["step"], state["weight"].mean().item()) == (1, 1, 1.0)
    assert list(found.refused) == [str(tmp_path / "step-00000002")]
    assert damage in found.refused[str(tmp_path / "step-00000002")]


def test_nothing_there_is_no_mistake(tmp_path: Path) -> None:
    assert latest(tmp_path / "none").folder is None
    with Checkpointer(tmp_path / "new") as checkpoints:
        assert checkpoints.load_latest({"x": torch.zeros(1)}).folder is None


KILLED = """
import os, signal, sys
import torch
from foretrace.llama.checkpoint import sharded

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def run(folder, where, how):
    with sharded.Checkpointer(folder) as checkpoints:
        checkpoints.save(1, {"weight": torch.ones(1000)})
        setattr(sharded, where, kill)
        (checkpoints.save_async if how == "async" else checkpoints.save)(2, {"weight": torch.zeros(1000)})

for case in sys.argv[2:]:
    child = os.fork()
    if not child:
        run(f"{sys.argv[1]}/{case}", *case.split("."))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_kill_9_in_the_middle_of_a_save(tmp_path: Path) -> None:
    cases = ("digests.async", "write_file.sync", "sync_file.sync")
    subprocess.run([sys.executable, "-c", KILLED, tmp_path, *cases], check=True)
    for case in cases:
        folder = tmp_path / case
        assert (folder / ".step-00000002.part" / "__0_0.distcp").exists()  # it was written in part
        state = {"weight": torch.zeros(1000)}
        with Checkpointer(folder) as checkpoints:
            found = checkpoints.load_latest(state)
            assert (found.step, found.refused, state["weight"].mean()) == (1, {}, 1.0)
            checkpoints.save(2, state)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", ["data", "manifest"])
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, is_async: bool) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, tensors(tmp_path))
    with monkeypatch.context() as patch:
        if place == "data":
            patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
        else:
            patch.setattr(sharded, "write_file", full)
        with pytest.raises(FormatError, match="No space left on device"):
            if is_async:
                checkpoints.save_async(2, tensors(tmp_path, 2))
                checkpoints.wait()
            else:
                checkpoints.save(2, tensors(tmp_path, 2))
    assert latest(tmp_path).step == 1
    checkpoints.save(2, tensors(tmp_path, 2))
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    for wrong, place in (({"a": {"b": [1, Path()]}}, r"a\.b\[1\] is a pathlib"), ({"a": {1.5: 0}}, "a has a key 1.5")):
        with pytest.raises(ValueError, match=place):
            checkpoints.save(1, wrong)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        saved = checkpoints.save(1, tensors(tmp_path))
    with pytest.raises(FormatError, match="other"):
        load(saved, {"other": torch.zeros(3)})
    with pytest.raises(FormatError, match="weight"):
        load(saved, {"weight": torch.zeros(3, 3)})


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def test_pickles_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    with Checkpointer(tmp_path) as checkpoints:
        saved = checkpoints.save(1, tensors(tmp_path))
    index = saved / ".metadata"
    original = index.read_bytes()
    index.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(FormatError, match=r"\.metadata.*posix\.mkdir"):
        load(saved, empty())
    # A stranger's whole checkpoint, as PyTorch's own writer makes it, with its index in order.
    index.write_bytes(original)
    monkeypatch.setattr(sharded, "check_plain", lambda state: None)
    with Checkpointer(tmp_path) as checkpoints:
        saved = checkpoints.save(2, {"weight": torch.zeros(3), "value": Evil()})
    with pytest.raises(FormatError, match="Weights only load failed"):
        load(saved, {"weight": torch.zeros(3), "value": 0})
    assert not (tmp_path / "evil").exists()


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        saved = checkpoints.save(1, tensors(tmp_path))
    content = pickle.loads((saved / ".metadata").read_bytes())
    for stored in content.storage_data.values():
        stored.relative_path = "../secret"
    (saved / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(FormatError, match="outside of its folder"):
        load(saved, empty())


# Several ranks, and other layouts.

RANKS = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from foretrace.llama.checkpoint.sharded import Checkpointer, TrainingState
from tests.llama.checkpoints import config_of, model_of

folder, layout, action = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo")
model = model_of(config_of(layers=1), 0 if action != "load" else 9)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
if layout == "tp":
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    rows = ("attention.wo", "feed_forward.w2")
    plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
    parallelize_module(model.layers["0"], mesh, plan)
else:
    fully_shard(model.layers["0"], mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=layout != "tp", foreach=False)
tokens = torch.arange(16).reshape(2, 8) + 5

def step():
    optimizer.zero_grad()
    loss = model(tokens).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

losses = []
with Checkpointer(folder, keep=2) as checkpoints:
    progress = {"step": 0}
    state = {"training": TrainingState(model, optimizer), "progress": progress}
    if action == "load":
        found = checkpoints.load_latest(state)
        assert found.step == progress["step"] == 2, found
    else:
        losses = [step(), step()]
        progress["step"] = 2
        (checkpoints.save_async if action == "async" else checkpoints.save)(2, state)
    losses += [step(), step()]
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def ranks(folder: Path, count: int, layout: str, action: str) -> list[float]:
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    store = folder.with_name(f"{folder.name}.{layout}.{action}.py")
    store.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", str(store)]
    done = subprocess.run(
        [*command, str(folder), layout, action], env={**environment, "PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.slow
def test_saved_by_two_ranks_of_fsdp_loaded_by_tensor_parallel_and_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    losses = ranks(folder, 2, "fsdp", "async")
    files = json.loads((folder / "step-00000002" / "manifest.json").read_text())["files"]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} == set(files)
    for count, layout in ((2, "tp"), (3, "fsdp")):
        assert ranks(folder, count, layout, "load") == pytest.approx(losses[2:], rel=1e-5)
    model, optimizer = trained(1, seed=4)
    with Checkpointer(folder) as checkpoints:
        checkpoints.load_latest({"training": TrainingState(model, optimizer)})
    tokens = torch.arange(16).reshape(2, 8) + 5
    assert model(tokens).square().mean().item() == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.slow
def test_saved_by_tensor_parallel_loaded_by_fsdp(tmp_path: Path) -> None:
    losses = ranks(tmp_path / "run", 2, "tp", "sync")
    assert ranks(tmp_path / "run", 2, "fsdp", "load") == pytest.approx(losses[2:], rel=1e-5)
