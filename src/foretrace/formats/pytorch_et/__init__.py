"""PyTorch execution traces (JSON, schemas 1.0.1 to 1.1.1) -> `OperatorTrace`."""

from foretrace.formats.pytorch_et.read import read_operators

__all__ = ["read_operators"]
