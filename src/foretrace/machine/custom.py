"""Where collective algorithms of one's own lie: Chakra ETs, one for each place in a group."""

from __future__ import annotations

from pathlib import Path

from foretrace.machine.config_file import Section, shown

_SUFFIX = ".0.et"


def prefix_of(section: Section, key: str, value: object) -> str:
    """A prefix of ETs, ``PREFIX.0.et`` and so on, relative to the working directory or else to the file's folder.

    Raises:
        FormatError: naming file and key, if there is no such file.
    """
    if not isinstance(value, str) or not value:
        section.fail(key, f"is {shown(value)}, not the prefix of ETs", "write PREFIX for PREFIX.0.et, PREFIX.1.et, ...")
    beside = Path(section.path).parent / value
    for found in (Path(value), beside):
        if Path(f"{found}{_SUFFIX}").is_file():
            return str(found)
    section.fail(key, f"is {value!r}: there is no {value}{_SUFFIX} here, nor {beside}{_SUFFIX}",
                 "write PREFIX for PREFIX.0.et, PREFIX.1.et, ...")  # fmt: skip


def files_of(prefix: str) -> list[Path]:
    """The ETs of a prefix, by their place in the group."""
    found: list[Path] = []
    while (path := Path(f"{prefix}.{len(found)}.et")).is_file():
        found.append(path)
    return found
