"""Capture without hardware: what scripts of each kind of parallelism compute and communicate."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import foretrace.formats.pytorch_et as pytorch_et
from foretrace.capture.fake import CaptureError, main
from foretrace.trace import FormatError

LLAMA = Path(__file__).resolve().parents[2] / "examples" / "fake_llama.py"
# Llama-2-7B's proportions at an eighth of its width.
SMALL = [
    "--layers",
    "2",
    "--width",
    "512",
    "--hidden",
    "1376",
    "--heads",
    "16",
    "--vocabulary",
    "4096",
    "--length",
    "96",
]

FSDP = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
width = int(sys.argv[1]) if len(sys.argv) > 1 else 16
model = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width), nn.Linear(width, 4, bias=False))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    loss = nn.functional.cross_entropy(model(torch.randn(8, width)), torch.randint(4, (8,)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
dist.destroy_process_group()
"""
# Runs a script in a real process group and notes the collectives of its second step.
WATCH = """
import json, runpy, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps = [[]]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented
        name = func._schema.name
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            sizes = [[t.numel(), str(t.dtype)] for t in leaves if isinstance(t, torch.Tensor)]
            self.steps[-1].append([name, sizes])
        return func(*args, **(kwargs or {}))

import torch.distributed.tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
watch = Watch()
register_optimizer_step_post_hook(lambda *_: watch.steps.append([]))
out, sys.argv = sys.argv[1], sys.argv[2:]
with watch:
    runpy.run_path(sys.argv[0], run_name="__main__")
json.dump(watch.steps[1], open(out, "w"))
"""
DDP = """
import math, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Pairs(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        return torch.randn(16), index % 4

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)).cuda()
model = DistributedDataParallel(model, device_ids=[device.index], bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
data = Pairs()
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
for x, y in loader:
    x, y = x.to(device, non_blocking=True), y.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    if torch.isnan(loss):
        raise ValueError("diverged")
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"loss {loss.item():.3f} {math.exp(loss):.3f} norm {norm:.2f}", loss.cpu().numpy().shape, loss.tolist())
    torch.save(model.state_dict(), "checkpoint.pt")
"""
PIPELINE = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

schedule, shapes = sys.argv[1:]
dist.init_process_group("nccl")
rank, stages = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
is_last = rank == stages - 1
module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), *([nn.Linear(16, 4)] if is_last else [])).to(device)
told = {}
if shapes == "known":
    told["input_args"] = (torch.empty(2, 16, device=device, requires_grad=rank > 0),)
    told["output_args"] = (torch.empty(2, 4 if is_last else 16, device=device, requires_grad=True),)
stage = pipelining.PipelineStage(module, rank, stages, device, **told)
runner = getattr(pipelining, schedule)(stage, 4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.Adam(module.parameters())
for step in range(2):
    optimizer.zero_grad()
    if rank == 0:
        runner.step(torch.randn(8, 16, device=device))
    elif is_last:
        runner.step(target=torch.randint(4, (8,), device=device))
    else:
        runner.step()
    optimizer.step()
"""
MIXTURE = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module
)
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + checkpoint(lambda y: self.down(nn.functional.gelu(self.up(self.norm(y)))), x, use_reentrant=False)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(128, 32), Block(32), nn.Linear(32, 128)
    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=device)
mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
model = Model().cuda()
parallelize_module(model, mesh["tensor"], {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm": SequenceParallel(),
    "block.up": ColwiseParallel(input_layouts=Shard(1)),
    "block.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
})
model.block.compile()
fully_shard(model.block, mesh=mesh["replicate", "shard"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model, mesh=mesh["replicate", "shard"])
older = nn.Linear(128, 2, bias=False).cuda()
older = FullyShardedDataParallel(older, device_id=torch.cuda.current_device(), use_orig_params=True)
optimizer = torch.optim.AdamW([*model.parameters()], fused=True)
name = ["run"] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(name, src=0)
assert name == ["run"]
with torch.profiler.profile() as profiler:
    for step in range(2):
        tokens = torch.randint(128, (2, 16), device="cuda")
        older(torch.randn(4, 128, device="cuda")).sum().backward()
        with loss_parallel():
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        profiler.step()
"""
COLLECTIVES = """
import os
import torch, torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("cuda:nccl,cpu:gloo")
torch.set_default_device("cuda")
pair = dist.new_group([0, 2], group_desc="pair")
x = torch.randn(4, generator=torch.Generator("cuda").manual_seed(1))
parts = [torch.empty(4) for _ in range(size)]
dist.all_gather(parts, x)
dist.all_to_all_single(torch.empty(6), torch.empty(4), [3, 1, 1, 1], [1, 1, 1, 1])
dist.send(x, (rank + 1) % size, tag=7)
dist.recv(x, (rank - 1) % size)
dist.reduce_scatter(x, parts, op=dist.ReduceOp.PRODUCT)
dist.broadcast(x, 3)
dist.reduce(x, 1)
dist.barrier()
if rank in (0, 2):
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=pair)
everyone = [None] * size
dist.all_gather_object(everyone, rank)
"""
# Runs a script without the shortcuts of the capture; the script sees the very process that records it.
THE_LONG_WAY = """
import runpy, sys
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param
from foretrace.capture.fake import devices, foreach
devices._DIRECT = frozenset()
foreach.on_shards = lambda *_: NotImplemented
foreach.changes_nothing = lambda *_: False
_fsdp_param._chunk_with_empty = _fsdp_common._chunk_with_empty
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def capture(folder: Path, script: str | Path, *args: str, world_size: int, **more: Any) -> dict[str, Any]:
    """Capture a script, given as a file or as its text."""
    if isinstance(script, str):
        path = folder / "script.py"
        path.write_text(script)
        script = path
    more.setdefault("ranks", [0])
    try:
        return main(script, args, world_size=world_size, output=folder / "out", **more)
    except CaptureError as error:
        pytest.fail(f"{error}\n{error.details}")


def nodes_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The nodes of a trace, which must be sound."""
    with gzip.open(folder / "out" / f"rank{rank}.et.json.gz") as file:
        trace = json.load(file)
    assert trace["schema"] == "1.1.1-chakra.0.0.4"
    nodes: list[dict[str, Any]] = trace["nodes"]
    ids = {node["id"] for node in nodes}
    assert len(ids) == len(nodes)
    for node in nodes:
        assert node["ctrl_deps"] in ids and (node["ctrl_deps"] < node["id"] or node["id"] == 1)
        for side in (node["inputs"], node["outputs"]):
            assert len({len(part) for part in side.values()}) == 1
    for storage in trace["storages"]:
        assert storage["freed"] == -1 or storage["freed"] >= storage["allocated"]
    return nodes


def attributes(node: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry["value"] for entry in node["attrs"]}


def collectives_of(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Attributes of the nodes that communicate, in order of their start."""
    found = [attributes(node) for node in sorted(nodes, key=lambda node: node["id"])]
    return [told for told in found if "collective_name" in told]


def named(nodes: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [node for node in nodes if node["name"] == name]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Two layers of a Llama, FSDP 128 x TP 8, rank 0 of 1024."""
    folder = tmp_path_factory.mktemp("llama")
    job = capture(folder, LLAMA, *SMALL, world_size=1024)
    return folder, job, nodes_of(folder)


Captured = tuple[Path, dict[str, Any], list[dict[str, Any]]]


def test_collectives_of_fsdp_and_tensor_parallelism(llama: Captured) -> None:
    found = collectives_of(llama[2])
    # Each of the two layers and the root gathers its parameters; the layers do so again in the backward pass.
    # Each reduces its gradients once. Tensor parallelism: attention output and feed-forward output in the forward
    # pass, and the gradient of each column-parallel input: 3 + 2 a layer.
    assert Counter((told["collective_name"], told["pg_desc"], told["pg_size"]) for told in found) == {
        ("_allgather_base", "mesh_dp", 128): 5,
        ("_reduce_scatter_base", "mesh_dp", 128): 3,
        ("allreduce", "mesh_tp", 8): 14,
    }
    width, hidden, vocabulary, length = 512, 1376, 4096, 96
    layer = 4 * width * width // 8 + 3 * width * hidden // 8 + 2 * width
    root = 2 * vocabulary * width + width
    gathered = [told["out_msg_nelems"] for told in found if told["collective_name"] == "_allgather_base"]
    # The row-parallel weights are sharded along the columns already, so FSDP pads none of these sizes.
    assert all(elements % 128 == 0 for elements in gathered)
    assert [elements >= least for elements, least in zip(gathered, (root, layer, layer, layer, layer), strict=True)]
    assert gathered[0] == root and gathered[1] == gathered[2] == gathered[3] == gathered[4]
    assert {told["in_msg_nelems"] for told in found if told["collective_name"] == "allreduce"} == {length * width}
    assert {told["dtype"] for told in found} == {"BFloat16"}
    assert {told["reduce_op"] for told in found if told["pg_desc"] == "mesh_tp"} == {"SUM"}
    tensor_parallel = next(told for told in found if told["pg_desc"] == "mesh_tp")
    data_parallel = next(told for told in found if told["pg_desc"] == "mesh_dp")
    assert json.loads(tensor_parallel["pg_ranks"]) == list(range(8))
    assert json.loads(data_parallel["pg_ranks"]) == list(range(0, 1024, 8))
    assert (data_parallel["global_rank_start"], data_parallel["global_rank_stride"]) == (0, 8)


def test_operators_have_local_shapes(llama: Captured) -> None:
    nodes = llama[2]
    shapes = Counter(tuple(map(tuple, node["inputs"]["shapes"])) for node in named(nodes, "aten::mm"))
    width, hidden, vocabulary, length = 512, 1376 // 8, 4096, 96
    attention = width // 8
    layers = 2
    # Forward and input gradient of query, key and value, and of the output projection the other way round.
    assert shapes[(length, width), (width, attention)] == layers * (3 + 1)
    assert shapes[(length, attention), (attention, width)] == layers * (1 + 3)
    assert shapes[(length, width), (width, hidden)] == layers * (2 + 1)
    assert shapes[(length, hidden), (hidden, width)] == layers * (1 + 2)
    assert shapes[(length, width), (width, vocabulary)] == 1
    # Of each of the 7 weights of a layer and of the head: forward, input gradient, weight gradient.
    assert shapes.total() == 3 * (7 * layers + 1)
    attended = named(nodes, "aten::_scaled_dot_product_flash_attention")
    assert [node["inputs"]["shapes"][0] for node in attended] == [[1, 2, length, 32]] * layers


def test_tensors_are_on_cuda_and_kernels_are_whole(llama: Captured) -> None:
    nodes = llama[2]
    (product,) = named(nodes, "aten::mm")[:1]
    assert product["inputs"]["values"][0][5] == "cuda:0"
    assert product["inputs"]["types"] == ["Tensor(c10::BFloat16)"] * 2
    names = Counter(node["name"] for node in nodes)
    assert names["aten::_fused_rms_norm"] == names["aten::_fused_rms_norm_backward"] == 5
    assert names["aten::silu_backward"] == 2
    assert not {name for name in names if name.startswith(("prim::", "profiler::"))}


def test_call_tree(llama: Captured) -> None:
    nodes = llama[2]
    by_id = {node["id"]: node for node in nodes}

    def path(node: dict[str, Any]) -> list[str]:
        found = []
        while node["id"] != 1:
            node = by_id[node["ctrl_deps"]]
            found.append(node["name"])
        return found[::-1]

    forward = path(named(nodes, "aten::_scaled_dot_product_flash_attention")[1])
    assert forward[2] == "ProfilerStep#1"
    assert [name for name in forward if name.startswith("nn.Module")][1:] == [
        "nn.Module: layers.1#FSDPBlock",
        "nn.Module: layers.1.attention#Attention",
    ]
    backward = path(named(nodes, "aten::_scaled_dot_product_flash_attention_backward")[0])
    assert backward[-1] == "ScaledDotProductFlashAttentionBackward0"
    assert path(named(nodes, "aten::_foreach_addcdiv_")[0])[-1] == "Optimizer.step#AdamW.step"
    # The sequence number joins the operator and its backward function.
    made = attributes(named(nodes, "aten::_scaled_dot_product_flash_attention")[1])["seq_id"]
    (runs,) = [
        node for node in named(nodes, "ScaledDotProductFlashAttentionBackward0") if attributes(node)["seq_id"] == made
    ]
    assert attributes(runs)["scope"] == 1 and attributes(runs)["fw_tid"] == 1


def test_storages_live_and_die(llama: Captured) -> None:
    folder, _, nodes = llama
    with gzip.open(folder / "out" / "rank0.et.json.gz") as file:
        storages = json.load(file)["storages"]
    ids = {node["id"] for node in nodes}
    assert {storage["device"] for storage in storages} >= {"cuda:0"}
    assert all(storage["freed"] in ids for storage in storages if storage["freed"] != -1)
    gathers = sorted(named(nodes, "c10d::_allgather_base_"), key=lambda node: node["id"])
    (gathered,) = [s for s in storages if s["storage_id"] == gathers[1]["inputs"]["values"][0][1]]
    # The buffer of an all-gather is made for it, and gone before the gather after the next.
    assert 0 < gathered["allocated"] < gathers[1]["id"] < gathered["freed"] < gathers[3]["id"]
    assert gathered["size_bytes"] == 2 * collectives_of(nodes)[1]["out_msg_nelems"]
    # The parameters of a layer live twice: gathered for the forward and for the backward pass, in the same storage.
    (weight,) = [
        node["inputs"]["values"][1][1]
        for node in named(nodes, "aten::mm")
        if node["inputs"]["shapes"] == [[96, 512], [512, 172]]
    ][:1]
    lives = [s for s in storages if s["storage_id"] == weight]
    assert len(lives) == 2 and lives[0]["freed"] < lives[1]["allocated"]
    state = [s for s in storages if s["allocated"] == -1 and s["freed"] == -1]
    assert len(state) >= 3 * 21  # parameters and two moments


def test_our_reader_reads_it(llama: Captured) -> None:
    folder, job, nodes = llama
    trace = pytorch_et.read_operators(folder / "out" / "rank0.et.json.gz")
    assert (trace.rank, trace.num_nodes) == (0, len(nodes))
    assert not trace.report.dropped and not trace.report.repaired and not trace.report.guessed
    assert trace.collectives.num_rows == 22
    assert trace.storages.num_rows > 100
    assert {group.size for group in trace.groups.values()} == {1024, 128, 8}
    assert all(len(group.ranks) == group.size for group in trace.groups.values())
    assert job["nodes"] == {"0": len(nodes)}


def test_description_of_the_job(llama: Captured) -> None:
    folder, job, _ = llama
    assert json.loads((folder / "out" / "job.json").read_text()) == job
    assert (job["world_size"], job["steps"], job["traces"]) == (1024, [1], {"0": "rank0.et.json.gz"})
    assert (job["verified_by_tracing"], job["unknown"]) == (["0"], ["1-1023"])
    assert Counter(len(group["ranks"]) for group in job["groups"]) == {1024: 1, 128: 8, 8: 128}
    assert "step 0: loss 0.000" in (folder / "out" / "rank0.log").read_text()
    assert job["report"]["0"]["invented"] == {"value of a float32 scalar": 1}


@pytest.mark.slow
def test_shortcuts_change_nothing(llama: Captured, tmp_path: Path) -> None:
    capture(tmp_path, THE_LONG_WAY, str(LLAMA), *SMALL, world_size=1024)

    def essence(nodes: list[dict[str, Any]]) -> list[Any]:
        sides = ("shapes", "types", "strides")
        tensors = [[node[end][side] for end in ("inputs", "outputs") for side in sides] for node in nodes]
        return [(node["name"], node["attrs"], parts) for node, parts in zip(nodes, tensors, strict=True)]

    assert essence(nodes_of(tmp_path)) == essence(llama[2])


def test_same_collectives_as_a_real_run(tmp_path: Path) -> None:
    script, watch = tmp_path / "script.py", tmp_path / "watch.py"
    script.write_text(FSDP)
    watch.write_text(WATCH)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        told = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in told.items()}, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(watch), str(tmp_path / f"{rank}.json"), str(script)]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait(240) for process in processes] == [0, 0]
    capture(tmp_path, script, world_size=2, ranks=[0, 1], device="cpu")
    for rank in range(2):
        real = json.loads((tmp_path / f"{rank}.json").read_text())
        nodes = sorted(nodes_of(tmp_path, rank), key=lambda node: node["id"])
        faked = [[node["name"], _sizes(node)] for node in nodes if "collective_name" in attributes(node)]
        # 3 layers are gathered twice and reduced once; the norm of the gradients; the logged loss.
        assert len(real) == 3 * 2 + 3 + 1 + 1
        assert faked == real


def _sizes(node: dict[str, Any]) -> list[list[Any]]:
    """Elements and types of the tensors among the inputs."""
    dtypes = {"Tensor(float)": "torch.float32", "Tensor(int)": "torch.int32", "Tensor(long int)": "torch.int64"}
    found: list[list[Any]] = []

    def visit(value: Any, kind: str) -> None:
        if kind.startswith("Tensor("):
            found.append([value[3], dtypes[kind]])
        elif kind.startswith("GenericList["):
            for part, inner in zip(value, kind[12:-1].split(","), strict=True):
                visit(part, inner)

    for value, kind in zip(node["inputs"]["values"], node["inputs"]["types"], strict=True):
        visit(value, kind)
    return found


def test_ddp_with_everything_a_script_does(tmp_path: Path) -> None:
    job = capture(tmp_path, DDP, world_size=16)
    nodes = nodes_of(tmp_path)
    # Buckets are arranged anew in step 1, so step 2 is the first one that is like those to come.
    assert job["steps"] == [2]
    reduced = [told["in_msg_nelems"] for told in collectives_of(nodes)]
    # Gradients arrive from the last layer back: 4 x 512 + 4, then 512 x 512 + 512 (over the limit of half a MB
    # together, so the bucket closes), then the first layer.
    parameters = 16 * 512 + 512 + 512 * 512 + 512 + 512 * 4 + 4
    assert sum(reduced) == parameters and len(reduced) == 2
    names = Counter(node["name"] for node in nodes)
    assert names["aten::addmm"] == 3 and names["aten::_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert names["Optimizer.step#SGD.step"] == 1
    report = job["report"]["0"]
    assert report["skipped"]["torch.save"] == 2
    assert report["invented"]["value of a bool scalar"] == 3
    assert report["invented"]["NumPy array of a tensor: zeros"] == 2
    assert "loss 0.000 1.000 norm 0.00 () 0.0" in (tmp_path / "out" / "rank0.log").read_text()
    assert not (tmp_path / "checkpoint.pt").exists() and not Path("checkpoint.pt").exists()


@pytest.mark.parametrize("shapes", ["known", pytest.param("unknown", marks=pytest.mark.slow)])
def test_pipeline(tmp_path: Path, shapes: str) -> None:
    job = capture(tmp_path, PIPELINE, "ScheduleGPipe", shapes, world_size=4, ranks=None)
    assert job["traces"].keys() == {"0", "1", "3"}
    assert job["equal_to"] == {"2": 1}
    assert (job["verified_by_tracing"], job["inferred_from_symmetry"]) == (["0-3"], [])
    sent = {rank: _transfers(tmp_path, rank, "send") for rank in (0, 1, 3)}
    received = {rank: _transfers(tmp_path, rank, "recv") for rank in (0, 1, 3)}
    # Four micro-batches of 2 x 16 go down, and as many gradients up.
    assert sent == {0: {1: 4}, 1: {2: 4, 0: 4}, 3: {2: 4}}
    assert received == {0: {1: 4}, 1: {0: 4, 2: 4}, 3: {2: 4}}


def _transfers(folder: Path, rank: int, kind: str) -> dict[int, int]:
    found = [told for told in collectives_of(nodes_of(folder, rank)) if told["collective_name"] == kind]
    side, other = ("dst_rank", "src_rank") if kind == "send" else ("src_rank", "dst_rank")
    assert {told[other] for told in found} == {rank}
    assert {told["in_msg_nelems"] + told["out_msg_nelems"] for told in found} == {32}
    return dict(Counter(told[side] for told in found))


@pytest.mark.slow
def test_a_mixture_of_everything(tmp_path: Path) -> None:
    job = capture(tmp_path, MIXTURE, world_size=8, ranks=None)
    # One rank of each axis, rank 0 and the last.
    assert (job["equal_to"], job["verified_by_tracing"]) == ({"1-7": 0}, ["0-2", "4", "7"])
    found = collectives_of(nodes_of(tmp_path))
    counts = Counter((told["collective_name"], told["pg_desc"]) for told in found)
    # Hybrid sharding: each of the two parameter groups is gathered, reduce-scattered and all-reduced.
    assert counts["_reduce_scatter_base", "mesh_shard"] == counts["allreduce", "mesh_replicate"] == 2
    assert counts["_allgather_base", "mesh_shard"] >= 3
    assert counts["_allgather_base", "mesh_tensor"] and counts["_reduce_scatter_base", "mesh_tensor"]
    # Another FSDP, over the whole world.
    assert counts["_allgather_base", "default_pg"] == counts["_reduce_scatter_base", "default_pg"] == 1
    skipped = job["report"]["0"]["skipped"]
    assert skipped == {"torch.compile: operators are those of the eager program": 1, "profiler of the script": 1}


def test_attributes_of_collectives(tmp_path: Path) -> None:
    job = capture(tmp_path, COLLECTIVES, world_size=4, ranks=[0, 1, 2, 3])
    found = collectives_of(nodes_of(tmp_path))
    by_name = {told["collective_name"]: told for told in found}
    assert list(by_name) == [
        *("all_gather", "all_to_allv", "send", "recv", "reduce_scatter", "broadcast", "reduce", "barrier", "allreduce")
    ]
    assert (by_name["all_gather"]["in_msg_nelems"], by_name["all_gather"]["out_msg_nelems"]) == (4, 16)
    split = by_name["all_to_allv"]
    assert (split["in_split_size"], split["out_split_size"]) == ("[1, 1, 1, 1]", "[3, 1, 1, 1]")
    assert [by_name["send"][name] for name in ("src_rank", "dst_rank", "tag")] == [0, 1, 7]
    assert [by_name["recv"][name] for name in ("src_rank", "dst_rank", "tag")] == [3, 0, 0]
    assert (by_name["reduce_scatter"]["reduce_op"], by_name["allreduce"]["reduce_op"]) == ("PRODUCT", "AVG")
    assert (by_name["broadcast"]["src_rank"], by_name["reduce"]["dst_rank"]) == (3, 1)
    pair = by_name["allreduce"]
    assert (pair["pg_desc"], pair["pg_size"], pair["pg_ranks"], pair["global_rank_stride"]) == ("pair", 2, "[0, 2]", 2)
    # Rank 1 is a root, rank 3 another, ranks 0 and 2 reduce in a pair: they alone are alike.
    assert job["equal_to"] == {"2": 0}
    assert job["report"]["0"]["invented"] == {"objects of all_gather_object: this rank's own for all": 1}


@pytest.mark.slow
def test_stages_of_1f1b_all_differ(tmp_path: Path) -> None:
    job = capture(tmp_path, PIPELINE, "Schedule1F1B", "known", world_size=4, ranks=None)
    assert job["traces"].keys() == {"0", "1", "2", "3"} and not job["equal_to"]


@pytest.mark.slow
def test_uneven_shards(tmp_path: Path) -> None:
    # The layers of 32 and 36 rows split evenly over 4 ranks, that of 4 rows as well; 36 columns matter to none.
    even = capture(tmp_path, FSDP, "36", world_size=4, ranks=None, device="cpu")
    assert even["equal_to"] == {"1-3": 0} and even["inferred_from_symmetry"] == ["2"]
    # Of 6 rows over 8 ranks six hold one each; 32 rows split evenly, 4 rows lie on four ranks.
    uneven = capture(tmp_path, FSDP, "6", world_size=8, ranks=None, device="cpu")
    assert uneven["traces"].keys() == {"0", "4", "6"}
    assert uneven["equal_to"] == {"1-3": 0, "5": 4, "7": 6}
    assert not uneven["unknown"]


def test_a_script_without_optimizer_is_one_step(tmp_path: Path) -> None:
    script = "import torch\ny = torch.nn.Linear(4, 2)(torch.ones(3, 4))\n"
    job = capture(tmp_path, script, world_size=1, device="cpu")
    assert job["steps"] == [0] and job["fewer_steps_than_asked"] == {"steps": 1, "warm_up": 1}
    assert len(named(nodes_of(tmp_path), "aten::addmm")) == 1


@pytest.mark.slow
def test_steps_are_chosen(tmp_path: Path) -> None:
    job = capture(tmp_path, FSDP, world_size=2, device="cpu", steps=2, warm_up=0)
    names = [node["name"] for node in nodes_of(tmp_path)]
    assert job["steps"] == [0, 1] and names.count("Optimizer.step#AdamW.step") == 2
    assert {"ProfilerStep#0", "ProfilerStep#1"} <= set(names) and "ProfilerStep#2" not in names
    job = capture(tmp_path, FSDP, world_size=2, device="cpu", steps=9, warm_up=5)
    assert job["steps"] == [0, 1, 2]


def test_data_dependent_shapes_are_the_largest(tmp_path: Path) -> None:
    script = """
import torch
x = torch.randn(6, 4)
mask = x > 0
assert x[mask].shape == (24,) and mask.nonzero().shape == (24, 2) and torch.unique(x).shape == (24,)
assert torch.masked_select(x, mask).shape == (24,)
assert not mask.any() and int(mask.sum()) == 1 and x.sum().item() == 0.0
"""
    report = capture(tmp_path, script, world_size=1, device="cpu")["report"]["0"]
    assert report["invented"]["shape of aten::masked_select: the largest possible"] == 1
    assert sum(report["invented"].values()) == 7


def test_what_cannot_be_captured(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    with pytest.raises(FormatError, match="no such script"):
        main(script, [], world_size=2, ranks=None, output=tmp_path)
    script.write_text("raise KeyError('lost')\n")
    for wrong in ({"world_size": 0}, {"ranks": [2]}, {"steps": 0}, {"device": "tpu"}):
        with pytest.raises(ValueError, match=r"must be|is none of"):
            main(script, [], **{"world_size": 2, "ranks": None, "output": tmp_path, **wrong})
    with pytest.raises(CaptureError, match=r"script.py: rank 0 failed: KeyError: 'lost'") as error:
        main(script, [], world_size=2, ranks=None, output=tmp_path / "out")
    assert "raise KeyError('lost')" in error.value.details
    script.write_text("import torch.distributed as d\nd.init_process_group()\nd.recv_object_list([None], src=1)\n")
    script.write_text(script.read_text().replace("src=1", "src=1 - d.get_rank()"))
    with pytest.raises(CaptureError, match="ranks wait for objects that nobody sends"):
        main(script, [], world_size=2, ranks=None, output=tmp_path / "out")
