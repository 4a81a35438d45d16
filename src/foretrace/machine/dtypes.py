"""Element types: their names in every spelling that traces use, their sizes, and which type a result has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

# PyTorch's name -> bytes of an element. Types of less than a byte are counted as they are stored: packed into bytes.
_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
}

# C++ spellings (Kineto, PyTorch execution traces; they differ by compiler) and PyTorch's ScalarType names (metadata of
# collectives), in lower case and without ``c10::``.
_SPELLINGS = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "unsigned char": "uint8",
    "byte": "uint8",
    "signed char": "int8",
    "char": "int8",
    "short": "int16",
    "short int": "int16",
    "unsigned short": "uint16",
    "short unsigned int": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "__int64": "int64",
    "unsigned long": "uint64",
    "long unsigned int": "uint64",
    "unsigned long long": "uint64",
    "unsigned __int64": "uint64",
    "complex<half>": "complex32",
    "complex<float>": "complex64",
    "complex<double>": "complex128",
    "complexhalf": "complex32",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}
_TENSOR = re.compile(r"^Tensor\((.*)\)$", re.DOTALL)

# PyTorch's ScalarType numbers, which is how an argument ``dtype`` is recorded.
_NUMBERS = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    8: "complex32",
    9: "complex64",
    10: "complex128",
    11: "bool",
    12: "qint8",
    13: "quint8",
    14: "qint32",
    15: "bfloat16",
    16: "quint4x2",
    17: "quint2x4",
    23: "float8_e5m2",
    24: "float8_e4m3fn",
    25: "float8_e5m2fnuz",
    26: "float8_e4m3fnuz",
    27: "uint16",
    28: "uint32",
    29: "uint64",
    44: "float8_e8m0fnu",
    45: "float4_e2m1fn_x2",
}

_SIGNED = ("int8", "int16", "int32", "int64")


@cache
def normalize_dtype(text: str) -> str:
    """PyTorch's name of an element type, ``""`` for what is none.

    Takes C++ names (``c10::BFloat16``, ``long int``, ``c10::complex<float>``), PyTorch's own (``torch.float32``,
    ``float32``), ScalarType names (``Float``, ``ComplexFloat``) and all of these within ``Tensor(...)``.
    """
    inner = _TENSOR.match(text.strip())
    name = (inner.group(1) if inner else text).strip().replace("c10::", "").removeprefix("torch.").lower()
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    return name if name in _BYTES else ""


def element_bytes(dtype: str) -> int:
    """Bytes of one element, for any spelling that `normalize_dtype` takes.

    Raises:
        ValueError: if there is no such type.
    """
    found = _BYTES.get(dtype) or _BYTES.get(normalize_dtype(dtype))
    if found is None:
        raise ValueError(f"{dtype!r} is no element type; name one as PyTorch does, such as 'bfloat16'")
    return found


def dtype_of_number(number: int) -> str:
    """The type that PyTorch's ScalarType number stands for, ``""`` if unknown."""
    return _NUMBERS.get(number, "")


def is_floating(dtype: str) -> bool:
    """Whether it holds real or complex floating-point numbers."""
    return dtype.startswith(("float", "bfloat", "complex"))


def promote(dtypes: Iterable[str]) -> str:
    """The type that PyTorch computes with on tensors of these types, ``""`` where it has no answer.

    For tensors of one kind (all with dimensions, or all without): see `promote_groups` for a mixture.
    """
    distinct = sorted(set(dtypes))
    result = distinct[0] if distinct else ""
    for dtype in distinct[1:]:
        result = _promote_two(result, dtype)
    return result


def promote_groups(groups: Iterable[Iterable[str]]) -> str:
    """The result of tensors with dimensions, tensors without, and numbers, in this order of precedence.

    A later group matters only where it is of a higher category (Boolean, integer, real, complex) than those before.
    """
    result = ""
    for group in groups:
        found = promote(group)
        if not result or (found and _category(found) > _category(result)):
            result = found
    return result


def _category(dtype: str) -> int:
    if dtype == "bool":
        return 0
    if not is_floating(dtype):
        return 1
    return 3 if dtype.startswith("complex") else 2


@cache
def _promote_two(one: str, other: str) -> str:
    if one == other or not one or not other:
        return one if one == other else ""
    low, high = sorted((one, other), key=lambda dtype: (_category(dtype), _BYTES[dtype]))
    if any(dtype.startswith(("q", "float8", "float4")) for dtype in (low, high)):
        return ""
    if _category(high) == 3:
        return _promote_complex(low, high)
    if _category(low) < _category(high):
        return high
    if _category(high) == 2:
        return high if _BYTES[high] > _BYTES[low] else "float32"  # float16 with bfloat16
    return _promote_integers(low, high)


def _promote_complex(low: str, high: str) -> str:
    if _category(low) < 2 or _BYTES[low] * (1 if low.startswith("complex") else 2) <= _BYTES[high]:
        return "complex64" if (low, high) == ("bfloat16", "complex32") else high
    return {"float32": "complex64", "float64": "complex128"}[low]


def _promote_integers(low: str, high: str) -> str:
    unsigned = [dtype for dtype in (low, high) if dtype not in _SIGNED]
    if not unsigned:
        return high
    if len(unsigned) == 2:
        return ""
    if unsigned[0] != "uint8":  # PyTorch has no answer for the wider ones
        return ""
    signed = low if unsigned[0] == high else high
    return "int16" if signed == "int8" else signed
