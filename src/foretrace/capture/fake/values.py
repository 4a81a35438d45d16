"""Arguments and results of operators in the form of PyTorch's execution trace: value, shape, type and strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from foretrace.capture.fake.devices import python_device
from foretrace.capture.fake.tensors import TensorNumbers

# Names and codes as C++ has them (c10/core/ScalarType.h).
_DTYPES: tuple[tuple[str, str, int], ...] = (
    ("uint8", "unsigned char", 0),
    ("int8", "signed char", 1),
    ("int16", "short int", 2),
    ("int32", "int", 3),
    ("int64", "long int", 4),
    ("float16", "c10::Half", 5),
    ("float32", "float", 6),
    ("float64", "double", 7),
    ("complex32", "c10::complex<c10::Half>", 8),
    ("complex64", "c10::complex<float>", 9),
    ("complex128", "c10::complex<double>", 10),
    ("bool", "bool", 11),
    ("bfloat16", "c10::BFloat16", 15),
    ("float8_e5m2", "c10::Float8_e5m2", 23),
    ("float8_e4m3fn", "c10::Float8_e4m3fn", 24),
    ("float8_e5m2fnuz", "c10::Float8_e5m2fnuz", 25),
    ("float8_e4m3fnuz", "c10::Float8_e4m3fnuz", 26),
    ("uint16", "short unsigned int", 27),
    ("uint32", "unsigned int", 28),
    ("uint64", "long unsigned int", 29),
)
_TYPE_OF = {getattr(torch, name): f"Tensor({cpp})" for name, cpp, _ in _DTYPES if hasattr(torch, name)}
_CODE_OF = {getattr(torch, name): code for name, _, code in _DTYPES if hasattr(torch, name)}
_LAYOUTS = {torch.strided: 0, torch.sparse_coo: 1}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class Encoded(NamedTuple):
    """Four parallel lists, one entry for each argument."""

    values: list[Any]
    shapes: list[Any]
    types: list[str]
    strides: list[Any]


def encode_all(arguments: Sequence[Any], numbers: TensorNumbers, node: int) -> Encoded:
    """Arguments of one operator.

    Args:
        arguments: in the order of the schema.
        numbers: where tensors get their numbers.
        node: the node that made new tensors among them, -1 for inputs.
    """
    encoded = Encoded([], [], [], [])
    for argument in arguments:
        value, shape, kind, strides = _encode(argument, numbers, node)
        encoded.values.append(value)
        encoded.shapes.append(shape)
        encoded.types.append(kind)
        encoded.strides.append(strides)
    return encoded


def dtype_name(dtype: torch.dtype) -> str:
    """``BFloat16``, ``Float``, ...: the names of NCCL's metadata."""
    cpp = _TYPE_OF.get(dtype, "Tensor(Undefined)")[7:-1].removeprefix("c10::")
    special = {"unsigned char": "Byte", "signed char": "Char", "short int": "Short", "long int": "Long"}
    return special.get(cpp, cpp[:1].upper() + cpp[1:])


def _encode(argument: Any, numbers: TensorNumbers, node: int) -> tuple[Any, Any, str, Any]:
    if isinstance(argument, torch.Tensor):
        return _tensor(argument, numbers, node)
    if argument is None:
        return "<None>", [], "None", []
    if isinstance(argument, bool):
        return argument, [], "Bool", []
    if isinstance(argument, int):
        return argument, [], "Int", []
    if isinstance(argument, float):
        return (argument if math.isfinite(argument) else f"<{argument}>"), [], "Double", []
    if isinstance(argument, str):
        return argument, [], "String", []
    if isinstance(argument, list | tuple):
        parts = encode_all(argument, numbers, node)
        return parts.values, parts.shapes, f"GenericList[{','.join(parts.types)}]", parts.strides
    return _other(argument), [], _other_type(argument), []


@cache
def device_name(device: torch.device) -> str:
    """``cuda:0``, ``cpu``, ..."""
    return str(python_device(device))


def _tensor(tensor: torch.Tensor, numbers: TensorNumbers, node: int) -> tuple[Any, Any, str, Any]:
    number = numbers.tensor(tensor)
    shape = list(tensor.shape)
    kind = _TYPE_OF.get(tensor.dtype, f"Tensor({tensor.dtype})")
    device = device_name(tensor.device)
    if tensor.layout is not torch.strided:
        return [number, 0, 0, tensor.numel(), tensor.itemsize, device], shape, kind, []
    storage = numbers.storage(tensor, node)
    value = [number, storage, tensor.storage_offset(), math.prod(shape), tensor.itemsize, device]
    return value, shape, kind, list(tensor.stride())


def _other(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return _CODE_OF.get(argument, -1)
    if isinstance(argument, torch.layout):
        return _LAYOUTS.get(argument, -1)
    if isinstance(argument, torch.memory_format):
        return _MEMORY_FORMATS.get(argument, -1)
    if isinstance(argument, torch.device):
        return device_name(argument)
    if isinstance(argument, torch.Generator):
        return "<Generator>"
    if isinstance(argument, complex):
        return str(argument)
    return "<Object>"


def _other_type(argument: Any) -> str:
    if isinstance(argument, torch.dtype | torch.layout | torch.memory_format):
        return "Int"
    if isinstance(argument, torch.device):
        return "Device"
    if isinstance(argument, torch.Generator):
        return "Generator"
    return "ComplexDouble" if isinstance(argument, complex) else "Object"
