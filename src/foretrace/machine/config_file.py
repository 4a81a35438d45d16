"""Reading configuration files: every value is checked, and what is wrong is named by file and key."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Final, NoReturn

from foretrace.trace.reading import FormatError

REQUIRED: Final = object()  # the default of a key that has none
_LARGEST_COUNT = (1 << 31) - 1
_SHOWN = 40  # characters of a value in a message
# What a number is in YAML 1.2. (YAML 1.1, PyYAML's own, takes 1:30 for 90, 010 for 8, and 1e9 for a text.)
_INTEGER = re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


Notes = Counter[str]


def note(notes: Notes | None, reason: str) -> None:
    """Count what a reader left out or simplified, if somebody wants to know."""
    if notes is not None:
        notes[reason] += 1


@dataclass(frozen=True)
class Limits:
    """Which numbers a key takes.

    Attributes:
        above: numbers up to this are too small.
        least: numbers below this are too small.
        most: numbers above this are too large.
    """

    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.above < number and self.least <= number <= self.most

    @property
    def wanted(self) -> str:
        """In words."""
        words = [("above", self.above), ("not below", self.least), ("not above", self.most)]
        return " ".join(["a number", *(f"{word} {limit:g}" for word, limit in words if math.isfinite(limit))])


ANY = Limits()
DURATION_NS = Limits(least=0, most=1 << 53)  # beyond, a double does not count nanoseconds
RATE = Limits(above=0, least=1e-9, most=1e15)  # 10^9 of anything a second, and more than any machine


class _DuplicateKey(ValueError):
    pass


class _NoNumber(ValueError):
    pass


class Section:
    """One mapping of a file. Each key is taken once; what is left at the end nobody knew.

    Attributes:
        path: the file, for messages.
        place: the keys that lead here, ``""`` at the top.
    """

    def __init__(self, path: str, values: dict[str, Any], place: str = "") -> None:
        self.path = path
        self.place = place
        self._values = dict(values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def key(self, key: str) -> str:
        """A key with the ones that lead to it."""
        return f"{self.place}.{key}" if self.place else key

    def fail(self, key: str, problem: str, remedy: str) -> NoReturn:
        """Say what is wrong with the value of a key."""
        raise FormatError(self.path, f"key {self.key(key)!r} {problem}", remedy)

    def take(self, key: str, default: Any = REQUIRED, remedy: str = "add it") -> Any:
        """The value of a key as it stands there."""
        return default if self._lacks(key, default, remedy) else self._values.pop(key)

    def _lacks(self, key: str, default: Any, remedy: str = "add it") -> bool:
        """Whether a key that has a default is absent."""
        if key in self._values:
            return False
        if default is REQUIRED:
            self.fail(key, "is missing", remedy)
        return True

    def rest(self) -> list[str]:
        """Keys that nobody took, sorted."""
        return sorted(self._values)

    def end(self, known: Collection[str]) -> None:
        """Refuse the keys that nobody took."""
        for key in self.rest():
            near = difflib.get_close_matches(key, known, 1)
            self.fail(key, "is unknown", f"write {near[0]!r}" if near else f"known are {', '.join(known)}")

    def number(self, key: str, default: Any = REQUIRED, limits: Limits = ANY) -> Any:
        """A finite number (`float`) within limits, or the default."""
        if self._lacks(key, default, f"add it: {limits.wanted}"):
            return default
        return self.as_number(key, self._values.pop(key), limits)

    def as_number(self, key: str, value: object, limits: Limits = ANY) -> float:
        """A value that must be a finite number within limits."""
        number = _number(value)
        if number is None or number not in limits:
            self.fail(key, f"is {shown(value)}, not {limits.wanted}", f"write {limits.wanted}")
        return number

    def integer(self, key: str, default: Any = REQUIRED, least: int = 0, most: int = _LARGEST_COUNT) -> Any:
        """A whole number (`int`) within limits, or the default."""
        if self._lacks(key, default, f"add it: a whole number from {least}"):
            return default
        return self.as_integer(key, self._values.pop(key), least, most)

    def as_integer(self, key: str, value: object, least: int = 0, most: int = _LARGEST_COUNT) -> int:
        """A value that must be a whole number; ``8.0`` is one."""
        number = _number(value)
        wanted = f"a whole number from {least} to {most}"
        if number is None or number != int(number) or not least <= int(number) <= most:
            self.fail(key, f"is {shown(value)}, not {wanted}", f"write {wanted}")
        return value if isinstance(value, int) else int(number)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, or the default."""
        if self._lacks(key, default):
            return default
        value = self._values.pop(key)
        if not isinstance(value, bool):
            self.fail(key, f"is {shown(value)}, not true or false", "write true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A text that is not empty, or the default."""
        if self._lacks(key, default):
            return default
        value = self._values.pop(key)
        if not isinstance(value, str) or not value.strip():
            self.fail(key, f"is {shown(value)}, not a text", "write a text")
        return value

    def choice(self, key: str, choices: Collection[str], default: Any = REQUIRED) -> Any:
        """One of several words, or the default."""
        if self._lacks(key, default, f"add it: one of {', '.join(choices)}"):
            return default
        return self.as_choice(key, self._values.pop(key), choices)

    def as_choice(self, key: str, value: object, choices: Collection[str]) -> str:
        """A value that must be one of several words."""
        if not isinstance(value, str) or value not in choices:
            self.fail(key, f"is {shown(value)}, which is unknown", f"write one of {', '.join(choices)}")
        return value

    def items(self, key: str, default: Any = REQUIRED) -> Any:
        """A list with at least one entry, or the default."""
        if self._lacks(key, default, "add it: a list"):
            return default
        value = self._values.pop(key)
        if not isinstance(value, list) or not value:
            what = "is an empty list" if value == [] else f"is {shown(value)}, not a list"
            self.fail(key, what, "write a list with one entry or more, like [a, b]")
        return value

    def section(self, key: str, default: Any = REQUIRED) -> Any:
        """The mapping (`Section`) of a key, or the default."""
        if self._lacks(key, default, "add it: keys with values"):
            return default
        return self.as_section(key, self._values.pop(key))

    def as_section(self, key: str, value: object) -> Section:
        """A value that must be a mapping."""
        if not isinstance(value, dict):
            self.fail(key, f"is {shown(value)}, not keys with values", "write keys with values")
        return _section(self.path, value, self.key(key))


def shown(value: object) -> str:
    """A value as a message shows it, in a few characters."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def read_json(path: str | PathLike[str]) -> Section:
    """A JSON file that holds an object. Duplicate keys, NaN and infinities are refused."""
    content = _content(path)
    try:
        document = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except _DuplicateKey as error:
        raise FormatError(str(path), str(error), "keep one of them") from None
    except _NoNumber as error:
        raise FormatError(str(path), str(error), "write a finite number") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(str(path), f"not JSON ({_first_line(error)})", "mend it there") from None
    return _document(path, document)


def read_yaml(path: str | PathLike[str], numbers_as_keys: bool = False) -> Section:
    """A YAML file that holds a mapping. Duplicate keys are refused; numbers are those of YAML 1.2.

    With ``numbers_as_keys`` whole numbers are keys at the top too, as their digits.
    """
    import yaml

    content = _content(path)
    try:
        document = yaml.load(content, Loader=_loader())  # a safe loader
    except _DuplicateKey as error:
        raise FormatError(str(path), str(error), "keep one of them") from None
    # Tags such as ``!!int x`` let constructors of PyYAML fail in many ways.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise FormatError(str(path), f"not YAML ({_first_line(error)})", "mend it there") from None
    if numbers_as_keys and isinstance(document, dict):
        document = {str(key) if type(key) is int else key: value for key, value in document.items()}
    return _document(path, document)


@cache
def _loader() -> type[Any]:
    """PyYAML's safe loader with YAML 1.2's plain values, and without duplicate keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - the base class has it like this

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, str):
                    continue  # refused later
                if key in seen:
                    raise _DuplicateKey(f"line {key_node.start_mark.line + 1}: key {key!r} stands there a second time")
                seen.add(key)
            return super().construct_mapping(node, deep)

    tag = "tag:yaml.org,2002:"
    Loader.add_implicit_resolver(f"{tag}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    Loader.add_implicit_resolver(f"{tag}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    Loader.add_implicit_resolver(f"{tag}int", _INTEGER, list("-+0123456789"))
    Loader.add_implicit_resolver(f"{tag}float", _FLOAT, list("-+.0123456789"))
    return Loader


def _content(path: str | PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"byte {error.start} is not UTF-8", "save the file as UTF-8 text") from None
    except OSError as error:
        raise FormatError(str(path), error.strerror or str(error), "check the path and its permissions") from None
    except ValueError as error:
        raise FormatError(str(path), str(error), "check the path") from None


def _document(path: str | PathLike[str], document: object) -> Section:
    if not isinstance(document, dict):
        raise FormatError(str(path), f"holds {shown(document)}, not keys with values", "write keys with values")
    return _section(str(path), document, "")


def _section(path: str, values: dict[Any, Any], place: str) -> Section:
    for key in values:
        if not isinstance(key, str):
            where = f" in {place!r}" if place else ""
            raise FormatError(path, f"key {shown(key)}{where} is not a text", "write the key as a text")
    return Section(path, values, place)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise _DuplicateKey(f"key {twice!r} stands there twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise _NoNumber(f"{name} is no number of JSON")


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _number(value: object) -> float | None:
    """A finite number, None for everything else (Booleans too)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
