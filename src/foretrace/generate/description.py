"""A workload in a few lines of YAML: a model, a parallel plan, and how fine the graph is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from foretrace.generate.model import MODELS, Transformer
from foretrace.generate.plan import ParallelPlan
from foretrace.generate.transformer import Granularity, generate
from foretrace.machine.config_file import Section, read_yaml
from foretrace.trace.reading import FormatError
from foretrace.trace.workload import Workload

SUFFIXES = (".yaml", ".yml")
_KEYS = ("model", "plan", "granularity")
_CHOICES = {
    "norm": ("rms", "layer"),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "recompute": ("none", "selective", "full"),
    "order": ("tp-pp-dp", "tp-dp-pp"),
}


def is_description(path: Path) -> bool:
    """Whether a file is a description by its name."""
    return path.name.endswith(SUFFIXES)


@dataclass(frozen=True)
class Description:
    """What `generate` takes.

    Attributes:
        model, plan, granularity: see `generate`.
        model_name: of a preset; "" for a model of its own.
    """

    model: Transformer
    plan: ParallelPlan
    granularity: Granularity = "operator"
    model_name: str = ""

    def workload(self) -> Workload:
        """The step that it describes.

        Raises:
            PlanError: if the plan does not fit the model.
        """
        return generate(self.model, self.plan, self.granularity)

    def to_yaml(self) -> str:
        """The text that `read_description` reads."""
        import yaml

        model: Any = self.model_name or dataclasses.asdict(self.model)
        values = {"model": model, "plan": _stated(self.plan), "granularity": self.granularity}
        return str(yaml.safe_dump(values, sort_keys=False))


def _stated(plan: ParallelPlan) -> dict[str, Any]:
    """What differs from the defaults, and the layout in any case."""
    default = ParallelPlan()
    names = [field.name for field in dataclasses.fields(plan)]
    layout = ("tp", "pp", "dp", "micro_batches")
    return {n: getattr(plan, n) for n in names if n in layout or getattr(plan, n) != getattr(default, n)}


def read_description(path: str | PathLike[str]) -> Description:
    """Read a description.

    ``model`` is a preset's name (``llama-2-7b``) or the fields of `Transformer`, with ``preset`` for what is not given;
    ``plan`` the fields of `ParallelPlan`; ``granularity`` ``operator`` or ``layer``.

    Raises:
        FormatError: naming file, key and remedy.
    """
    top = read_yaml(path)
    model, name = _model(top)
    plan = _fields(top.section("plan"), ParallelPlan, {})
    granularity = top.choice("granularity", get_args(Granularity), "operator")
    top.end(_KEYS)
    try:
        plan.check(model)
    except ValueError as error:
        raise FormatError(str(path), str(error), "change the plan") from None
    return Description(model, plan, granularity, name)


def _model(top: Section) -> tuple[Transformer, str]:
    value = top.take("model", remedy=f"name one of {', '.join(MODELS)}, or give its sizes")
    if isinstance(value, str):
        name = top.as_choice("model", value, tuple(MODELS))
        return MODELS[name], name
    section = top.as_section("model", value)
    preset = section.choice("preset", tuple(MODELS), None) if "preset" in section else None
    base = dataclasses.asdict(MODELS[preset]) if preset else {}
    return _fields(section, Transformer, base), ""


def _fields(section: Section, kind: type[Any], base: Mapping[str, Any]) -> Any:
    """An object of a dataclass from the keys of a section."""
    values = dict(base)
    names = [field.name for field in dataclasses.fields(kind)]
    for field in dataclasses.fields(kind):
        if field.name not in section:
            if field.default is dataclasses.MISSING and field.name not in values:
                section.take(field.name)  # says that it is missing
            continue
        if field.name in _CHOICES:
            values[field.name] = section.choice(field.name, _CHOICES[field.name])
        elif isinstance(field.default, bool):
            values[field.name] = section.flag(field.name, field.default)
        else:
            values[field.name] = section.integer(field.name, most=1 << 40)
    section.end(names)
    try:
        return kind(**values)
    except ValueError as error:
        raise FormatError(section.path, f"{section.place}: {error}", "change the sizes") from None
