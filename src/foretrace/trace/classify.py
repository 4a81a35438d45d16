"""What a device kernel does, told by its name: its kind and, for communication, which collective."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Names of 3,000 characters occur; what they do is said early.
_OWN_NAME_CHARACTERS = 100
_WHOLE_NAME_CHARACTERS = 300


class _Labeled(enum.IntEnum):
    """An enumeration whose members carry the word that tables show."""

    @property
    def label(self) -> str:
        """The member in lower case, as in tables and in kernel_kinds.yaml."""
        return self.name.lower()


class KernelKind(_Labeled):
    """What a kernel does. The numbers are stable, as files may hold them."""

    OTHER = 0
    COMMUNICATION = 1
    GEMM = 2
    CONVOLUTION = 3
    ATTENTION = 4
    NORMALIZATION = 5
    ELEMENTWISE = 6
    REDUCTION = 7
    EMBEDDING = 8
    OPTIMIZER = 9
    MEMORY = 10
    SOFTMAX = 11
    LOSS = 12
    SORT = 13
    INDEXING = 14
    POOLING = 15
    QUANTIZATION = 16
    ROUTING = 17
    RANDOM = 18


class CollectiveKind(_Labeled):
    """Which collective or point-to-point operation communication is. The numbers are stable."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    ALL_TO_ALL = 6
    SEND = 7
    RECV = 8
    SEND_RECV = 9
    BARRIER = 10
    GATHER = 11
    SCATTER = 12
    UNKNOWN = 13


# In this order: all_reduce and reduce_scatter hold "reduce", all_gather holds "gather", send_recv holds both.
_COLLECTIVE_WORDS: tuple[tuple[CollectiveKind, str], ...] = (
    (CollectiveKind.ALL_TO_ALL, r"all(?:_?to_?|2)all"),
    (CollectiveKind.REDUCE_SCATTER, r"reduce_?scatter|userbuffers\w*_rs(?![a-z])"),
    (CollectiveKind.ALL_GATHER, r"all_?gather|userbuffers\w*_ag(?![a-z])"),
    (CollectiveKind.ALL_REDUCE, r"all_?reduce|userbuffers\w*sum"),
    (CollectiveKind.BROADCAST, r"broadcast|bcast"),
    (CollectiveKind.BARRIER, r"barrier"),
    (CollectiveKind.SEND_RECV, r"send_?recv|recv_?send|batch_p2p"),
    (CollectiveKind.SEND, r"send"),
    (CollectiveKind.RECV, r"recv|receive"),
    (CollectiveKind.REDUCE, r"reduce"),
    (CollectiveKind.GATHER, r"gather"),
    (CollectiveKind.SCATTER, r"scatter"),
)

_Kind = TypeVar("_Kind", bound=_Labeled)
_Verdict = tuple[KernelKind, CollectiveKind]
_UNMATCHED: _Verdict = (KernelKind.OTHER, CollectiveKind.NONE)


@functools.cache
def _collective_from_text(text: str) -> CollectiveKind:
    """The collective that a kernel name, operator name or ``Collective name`` speaks of, or UNKNOWN."""
    lower = text.lower()
    for kind, pattern in _COLLECTIVE_WORDS:
        if re.search(pattern, lower):
            return kind
    return CollectiveKind.UNKNOWN


def _shorten(name: str) -> tuple[str, str]:
    """The function's own name, and the name with its arguments; both in lower case and without noise."""
    whole = name[: _WHOLE_NAME_CHARACTERS * 2].lower()
    if "(anonymous namespace)::" in whole:
        whole = whole.replace("(anonymous namespace)::", "")
    if "<unnamed>::" in whole:
        whole = whole.replace("<unnamed>::", "")
    whole = whole.removeprefix("void ")[:_WHOLE_NAME_CHARACTERS]
    return whole[:_OWN_NAME_CHARACTERS].partition("(")[0].partition("<")[0], whole


@dataclass(frozen=True, slots=True)
class _Search:
    """A regular expression that is compiled when it is first needed; most never are."""

    expression: str

    def __call__(self, text: str) -> object:
        return re.search(self.expression, text)


class _Pattern(NamedTuple):
    """One pattern: text that it needs, the rest of its work if there is more to it, and what it tells."""

    literal: str
    search: Callable[[str], object] | None
    verdict: _Verdict


class _Table:
    """The patterns of one file, in order."""

    def __init__(self, patterns: Iterable[_Pattern]) -> None:
        self._patterns = list(patterns)
        self._by_text: dict[str, _Verdict | None] = {}

    def find(self, own: str, whole: str) -> _Verdict | None:
        """What the first rule that matches says, of the function's own name if any does, else of the whole name."""
        verdict = self._first(own)
        return self._first(whole) if verdict is None and whole != own else verdict

    def _first(self, text: str) -> _Verdict | None:
        known = self._by_text
        if text not in known:
            known[text] = None
            # Looking for a plain text first is five times faster here than one expression for each rule.
            for literal, search, verdict in self._patterns:
                if literal in text and (search is None or search(text)):
                    known[text] = verdict
                    break
        return known[text]


class Classifier:
    """Tells kernels apart by name, with an ordered table of rules; a user's table comes before ours.

    Answers are kept, so each distinct name costs once.
    """

    def __init__(self, tables: Sequence[_Table]) -> None:
        self._tables = tuple(tables)
        self._verdicts: dict[str, _Verdict] = {}

    @staticmethod
    def default() -> Classifier:
        """The classifier of the table that Foretrace brings along; the same object each time."""
        return _default()

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], extend: bool = True) -> Classifier:
        """A classifier with the table in the file ``path``, followed by ours unless ``extend`` is false.

        The form of the file is described at the top of ``kernel_kinds.yaml``. A ValueError says what is wrong in it.
        """
        table = _read_table(Path(path))
        return cls([table, *_default()._tables] if extend else [table])

    def kernel_kind(self, name: str) -> KernelKind:
        """What the kernel ``name`` does."""
        return self._verdict(name)[0]

    def is_communication(self, name: str) -> bool:
        """Whether the kernel ``name`` moves data between ranks."""
        return self._verdict(name)[0] is KernelKind.COMMUNICATION

    def collective_kind(self, kernel_name: str, collective_arg: str = "") -> CollectiveKind:
        """Which collective a kernel or operator carries out; NONE if it is no communication.

        ``collective_arg`` is the event's ``Collective name``, which is believed before the name: NCCL runs several
        collectives as ``SendRecv`` and, on AMD, all of them as ``Generic``.
        """
        if collective_arg:
            told = _collective_from_text(collective_arg)
            if told is not CollectiveKind.UNKNOWN:
                return told
        kind, collective = self._verdict(kernel_name)
        if kind is KernelKind.COMMUNICATION:
            return collective
        return CollectiveKind.UNKNOWN if collective_arg else CollectiveKind.NONE

    def kernel_kinds(self, names: Sequence[str]) -> NDArray[np.int8]:
        """The kind of every name, for example of a whole string table; shape ``(len(names),)``."""
        import numpy as np

        verdict = self._verdict
        return np.fromiter((verdict(name)[0] for name in names), np.int8, len(names))

    def _verdict(self, name: str) -> _Verdict:
        verdict = self._verdicts.get(name)
        if verdict is None:
            own, whole = _shorten(name)
            verdict = _UNMATCHED
            for table in self._tables:
                found = table.find(own, whole)
                if found is not None:
                    verdict = found
                    break
            if verdict[0] is KernelKind.COMMUNICATION and verdict[1] is CollectiveKind.NONE:
                collective = _collective_from_text(own)
                if collective is CollectiveKind.UNKNOWN:
                    collective = _collective_from_text(whole)
                verdict = (verdict[0], collective)
            self._verdicts[name] = verdict
        return verdict


@functools.cache
def _default() -> Classifier:
    return Classifier([_read_table(Path(__file__).with_name("kernel_kinds.yaml"), is_ours=True)])


def _read_table(path: Path, is_ours: bool = False) -> _Table:
    """The rules of a YAML file. Raises ValueError naming file, rule and remedy.

    Of our own table the tests know that its expressions are valid, so it is not compiled as a whole.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(path.read_bytes(), Loader=loader)  # one of the two safe loaders
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as YAML: {error}. Patterns are best put in single quotes.") from error
    if not isinstance(document, dict) or set(document) != {"rules"} or not isinstance(document["rules"], list):
        raise ValueError(
            f"{path}: expected one key 'rules' with a list below it; write for example\n"
            "rules:\n  - kind: communication\n    any: ['my_all_reduce']"
        )
    return _Table(
        pattern
        for number, entry in enumerate(document["rules"], 1)
        for pattern in _read_rule(entry, f"{path}: rule {number}", is_ours)
    )


def _read_rule(entry: Any, where: str, is_ours: bool) -> list[_Pattern]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {entry!r} is no rule; write 'kind: ...' and 'any: [...]'")
    where = f"{where} (kind {entry.get('kind')!r})"
    unknown = [key for key in entry if key not in ("kind", "any", "collective", "note")]
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; a rule has 'kind', 'any', 'collective' and 'note'")
    kind = _member(KernelKind, "kind", entry.get("kind"), where)
    collective = CollectiveKind.NONE
    if "collective" in entry:
        collective = _member(CollectiveKind, "collective", entry["collective"], where)
        if kind is not KernelKind.COMMUNICATION:
            raise ValueError(f"{where}: 'collective' goes with kind communication only; leave it out")
    patterns = entry.get("any")
    if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"{where}: 'any' must be a list of regular expressions; write any: ['first', 'second']")
    return [_compile(pattern, (kind, collective), where, is_ours) for pattern in patterns]


def _member(kinds: type[_Kind], key: str, value: Any, where: str) -> _Kind:
    for member in kinds:
        if member.label == value:
            return member
    raise ValueError(f"{where}: {key} {value!r} does not exist; take one of {', '.join(m.label for m in kinds)}")


def _compile(pattern: str, verdict: _Verdict, where: str, is_ours: bool) -> _Pattern:
    # Names are searched in lower case. An escape such as \W keeps its case.
    lowered = re.sub(r"(\\.)|([A-Z]+)", lambda m: m[1] or m[2].lower(), pattern)
    if not re.search(r"[^\w:@ /-]", lowered):
        return _Pattern(lowered, None, verdict)
    try:
        expression = f"(?:{lowered})"
        if not is_ours:
            re.compile(expression)
        return _Pattern(_needed_text(lowered), _Search(expression), verdict)
    except re.error as error:
        raise ValueError(
            f"{where}: pattern {pattern!r} is no regular expression: {error}; "
            "put a backslash before each of \\ ( ) [ ] { } * + ? . | that stands for itself"
        ) from error


def _needed_text(pattern: str) -> str:
    """The longest plain text that stands in whatever ``pattern`` finds; ``""`` if there is none for certain."""
    best = run = ""
    depth = 0
    # An escape, a class, the parts of a repetition count, or one character.
    for token in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[^}]*\}|.", pattern, re.DOTALL):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            return ""
        if token in "?*" or token[0] == "{":
            run = run[:-1]
        if depth == 0 and len(token) == 1 and (token.isalnum() or token in "_:@ /-"):
            run += token
            continue
        best = max(best, run, key=len)
        run = ""
    return max(best, run, key=len)
