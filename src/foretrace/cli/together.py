"""Which options of ``foretrace simulate`` go together. One that would do nothing is refused, never ignored."""

from __future__ import annotations

import enum
from collections.abc import Collection

import typer

from foretrace import FormatError


class World(enum.Enum):
    """What is simulated, and how."""

    TRACES = enum.auto()
    CHAKRA = enum.auto()  # ETs from their own durations, without a machine
    ASTRA = enum.auto()
    CONGESTION = enum.auto()
    FAIR = enum.auto()


_RECORDED = (World.TRACES, World.CHAKRA)
_ASTRA = (World.ASTRA, World.CONGESTION)
_MACHINES = (*_ASTRA, World.FAIR)
# The worlds of each option that does not belong to all, by the name of its parameter.
_WORLDS: dict[str, Collection[World]] = {
    **dict.fromkeys(("scale", "alone"), _RECORDED),
    "dependencies": (World.CHAKRA,),
    "cache": (World.TRACES,),
    **dict.fromkeys(("memory", "comm_groups", "dtype", "jobs", "fidelity", "injection_scale", "per_rank"), _MACHINES),
    **dict.fromkeys(("queues_per_dim", "rendezvous", "fold", "phases_at_once"), _ASTRA),
    **dict.fromkeys(("straggler", "jitter", "seed", "slowdown", "link_slowdown"), (World.FAIR,)),
    **dict.fromkeys(("communication_slots", "fail"), (World.FAIR,)),
}


def given(context: typer.Context) -> dict[str, str]:
    """Options that stand on the command line, by the name of their parameter, as they were written."""
    found = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            off = parameter.secondary_opts and not context.params[name]
            found[name] = parameter.secondary_opts[0] if off else parameter.opts[0]
    return found


def check(options: dict[str, str], world: World) -> None:
    """Refuse options that mean nothing there.

    Args:
        options: see `given`.
        world: what is simulated.

    Raises:
        FormatError: naming the option and what it needs.
    """
    for name, option in options.items():
        worlds = _WORLDS.get(name, tuple(World))
        if world not in worlds:
            raise FormatError(option, *_why(worlds, world))


def _why(worlds: Collection[World], world: World) -> tuple[str, str]:
    """What an option of some worlds lacks in another, and a remedy."""
    if world in _RECORDED and set(worlds) <= set(_MACHINES):
        return "it belongs to a machine", "name one: --network and --system, or --machine"
    if world in _MACHINES and set(worlds) <= set(_RECORDED):
        return "it has no meaning on a machine", "leave it out, or leave out --network, --system and --machine"
    if world in _ASTRA:
        return "it needs --fidelity fair", "leave it out, or choose that"
    if world is World.FAIR:
        return "--fidelity fair knows nothing of it", "leave it out, or choose astra or astra-congestion"
    if world is World.CHAKRA:
        return "it belongs to timelines, and these are Chakra ETs", "leave it out"
    return "it belongs to Chakra ETs, and these are timelines", "leave it out"
