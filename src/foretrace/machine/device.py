"""`Device`: an accelerator, and its keys in the description of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from foretrace.machine.config_file import RATE, Limits, Section, shown
from foretrace.machine.dtypes import normalize_dtype

# Rates beside those of element types: of float32 where TF32 is allowed, of all float8_... and of all float4_... types.
_RATES = ("tfloat32", "float8", "float4")


@dataclass(frozen=True)
class Curve:
    """A fraction of the peak that depends on the size of the work.

    Attributes:
        points: sizes (FLOPs or bytes, ascending) with the fraction reached; none: 1 everywhere. Between two sizes the
            fraction is linear over the logarithm of the size; outside it stays as at the end.
    """

    points: tuple[tuple[float, float], ...] = ()

    def at(self, size: float) -> float:
        """The fraction at a size."""
        if not self.points:
            return 1.0
        sizes, fractions = zip(*self.points, strict=True)
        return float(np.interp(math.log(max(size, sizes[0])), np.log(sizes), fractions))


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        name: its product name.
        peak_flops_per_s: by element type (PyTorch's name, or ``float8``, ``float4``, ``tfloat32``), dense.
        memory_bytes_per_s, memory_bytes: of its own memory.
        compute_efficiency: fraction of the peak, over FLOPs. memory_efficiency: of the bandwidth, over bytes.
    """

    name: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: int
    compute_efficiency: Curve = Curve()
    memory_efficiency: Curve = Curve()

    def peak(self, dtype: str) -> float:
        """FLOPs a second for an element type, in any spelling that `normalize_dtype` takes.

        Raises:
            ValueError: if the description has none.
        """
        name = normalize_dtype(dtype) or dtype
        for key in (name, name.partition("_")[0]):
            if key in self.peak_flops_per_s:
                return self.peak_flops_per_s[key]
        known = ", ".join(self.peak_flops_per_s)
        raise ValueError(f"{self.name} has no peak for {dtype!r}; name one of {known}, or add it to the description")

    def time_ns(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Time of an operator by the roofline: the longer one of computing and of moving bytes."""
        compute = flops / (self.peak(dtype) * self.compute_efficiency.at(flops)) if flops else 0.0
        bandwidth = self.memory_bytes_per_s * self.memory_efficiency.at(moved_bytes)
        return max(compute, moved_bytes / bandwidth) * 1e9


def read_device(section: Section) -> Device:
    """A device's keys: ``name``, ``peak_tflops``, ``memory_bandwidth_gb_per_s``, ``memory_gb``, ``efficiency``."""
    device = Device(
        name=section.text("name"),
        peak_flops_per_s=_peaks(section, section.section("peak_tflops")),
        memory_bytes_per_s=section.number("memory_bandwidth_gb_per_s", limits=RATE) * 1e9,
        memory_bytes=round(section.number("memory_gb", limits=RATE) * 1e9),
        **_efficiency(section.section("efficiency", None)),
    )
    section.end(("name", "peak_tflops", "memory_bandwidth_gb_per_s", "memory_gb", "efficiency"))
    return device


def _peaks(top: Section, section: Section) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for key in section.rest():
        name = key if key in _RATES else normalize_dtype(key)
        if not name:
            remedy = f"name it as PyTorch does, such as 'bfloat16', or {', '.join(_RATES)}"
            section.fail(key, "is no element type", remedy)
        if name in peaks:
            section.fail(key, f"is {name} a second time", "keep one of them")
        peaks[name] = section.number(key, limits=RATE) * 1e12
    if not peaks:
        top.fail("peak_tflops", "is empty", "write TFLOPS by type, such as bfloat16: 312")
    return peaks


def _efficiency(section: Section | None) -> dict[str, Curve]:
    if section is None:
        return {}
    curves = {f"{key}_efficiency": _curve(section, key) for key in ("compute", "memory") if key in section}
    section.end(("compute", "memory"))
    return curves


def _curve(section: Section, key: str) -> Curve:
    value = section.take(key)
    if not isinstance(value, list):
        return Curve(((1.0, _fraction(section, key, value)),))
    points: list[tuple[float, float]] = []
    for at, pair in enumerate(value):
        place = f"{key}[{at}]"
        if not isinstance(pair, list) or len(pair) != 2:
            section.fail(place, f"is {shown(pair)}, not a pair", "write [size, fraction]")
        size = section.as_number(place, pair[0], Limits(above=points[-1][0] if points else 0))
        points.append((size, _fraction(section, place, pair[1])))
    if not points:
        section.fail(key, "is an empty list", "write pairs like [1e9, 0.5], or leave it out")
    return Curve(tuple(points))


def _fraction(section: Section, key: str, value: object) -> float:
    return section.as_number(key, value, Limits(above=0, most=1))
