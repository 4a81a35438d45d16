"""``foretrace generate``: a transformer's training step under a parallel plan, as Chakra ETs or as a description."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import FormatError
from foretrace.cli import show
from foretrace.cli.files import check_writable, write_atomically, written_together
from foretrace.cli.options import AsJson, print_json

PANEL = "Predict"


class Granularity(enum.StrEnum):
    """How fine the graph is."""

    operator = "operator"
    layer = "layer"


class Schedule(enum.StrEnum):
    """Of a pipeline."""

    one_f_one_b = "1f1b"
    gpipe = "gpipe"
    interleaved = "interleaved"


class Recompute(enum.StrEnum):
    """What the backward pass computes again."""

    none = "none"
    selective = "selective"
    full = "full"


def generate(
    model: Annotated[str, typer.Argument(help="A preset (llama-2-7b, ...) or a description (.yaml).")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A folder for one ET a rank, or a .yaml for a description.")
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of a pipeline in a step.")] = 1,
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a micro-batch.")] = 1,
    schedule: Annotated[Schedule, typer.Option(help="Of the pipeline.")] = Schedule.one_f_one_b,
    virtual_stages: Annotated[int, typer.Option(min=1, help="Of a rank, with --schedule interleaved.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Split norms along it.")] = False,
    zero: Annotated[int, typer.Option(min=0, max=3, help="What data-parallel ranks share out; 3 is FSDP.")] = 0,
    recompute: Annotated[Recompute, typer.Option(help="In the backward pass.")] = Recompute.none,
    granularity: Annotated[Granularity, typer.Option(help="A node an operator, or merged.")] = Granularity.operator,
    as_json: AsJson = False,
) -> None:
    """A training step of a transformer under a parallel plan: Chakra ETs, or a description for ``simulate``."""
    from foretrace.generate import ParallelPlan
    from foretrace.generate.description import is_description

    try:
        plan = ParallelPlan(
            tp=tp,
            pp=pp,
            dp=dp,
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size,
            schedule=schedule.value,
            virtual_stages=virtual_stages,
            sequence_parallel=sequence_parallel,
            zero=zero,  # type: ignore[arg-type]
            recompute=recompute.value,
        )
        description = _description(model, plan, granularity.value)
        description.plan.check(description.model)
    except ValueError as error:
        raise FormatError(model, str(error), "change the plan") from None
    write = _write_description if is_description(output) else _write_traces
    document = write(description, output)
    if as_json:
        print_json(document)
    else:
        for key, value in document.items():
            show.out.print(f"  {key.replace('_', ' ')}: {value}", highlight=False)


def _description(model: str, plan: Any, granularity: Any) -> Any:
    """What was asked for; a description's own plan counts, unless another one was given."""
    from foretrace.generate import MODELS, ParallelPlan
    from foretrace.generate.description import Description, is_description, read_description

    if is_description(Path(model)):
        found = read_description(model)
        if plan != ParallelPlan():
            found = dataclasses.replace(found, plan=plan, granularity=granularity)
        return found
    if model not in MODELS:
        raise FormatError(model, "no such model", f"name one of {', '.join(MODELS)}, or a description (.yaml)")
    return Description(MODELS[model], plan, granularity, model)


def _write_description(description: Any, output: Path) -> dict[str, Any]:
    check_writable(output)
    write_atomically(output, description.to_yaml().encode())
    return {"ranks": description.plan.world_size, "written": str(output)}


def _check_folder(output: Path, own: re.Pattern[str]) -> None:
    """Refuse a folder before any work is done for it: one that is a file, or that another job's ETs lie in."""
    if output.exists() and not output.is_dir():
        raise FormatError(str(output), "is a file", "name a folder for ETs, or a .yaml for a description")
    for path in output.iterdir() if output.is_dir() else ():
        if path.name.endswith((".et", ".et.gz")) and not own.fullmatch(path.name):
            raise FormatError(str(output), f"{path.name} of another job lies there", "name another folder")


def _write_traces(description: Any, output: Path) -> dict[str, Any]:
    from foretrace.estimate.cluster import GROUPS_FILE
    from foretrace.formats.chakra.from_workload import groups_document, to_chakra
    from foretrace.formats.chakra.write import write_chakra

    own = re.compile(rf"rank\.[0-9]+\.et|{re.escape(GROUPS_FILE)}")
    _check_folder(output, own)
    with show.working("generating"):
        try:
            workload = description.workload()
        except ValueError as error:
            raise FormatError(str(output), str(error), "change the plan or the model") from None
    with show.working(f"writing {workload.num_ranks:,} traces"), written_together(output, own) as folder:
        for rank in range(workload.num_ranks):
            write_chakra(to_chakra(workload, rank), folder / f"rank.{rank}.et")
        (folder / GROUPS_FILE).write_text(json.dumps(groups_document(workload)))
    return {
        "ranks": workload.num_ranks,
        "nodes": workload.num_nodes,
        "programs": len(workload.programs),
        "written": str(output),
        "comm_groups": str(output / GROUPS_FILE),
        "notes": dict(workload.notes),
    }
