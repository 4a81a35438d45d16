"""Record a running PyTorch program: ``with foretrace.capture.record(folder, steps="3:5") as recorder: ...``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.capture.recorder import Recorder, record

__all__ = ["Recorder", "record"]


def __getattr__(name: str) -> Any:
    """`record` and `Recorder` bring PyTorch in, which the launcher does without."""
    if name in __all__:
        try:
            from foretrace.capture import recorder
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError('recording needs PyTorch; install it with: pip install "foretrace[torch]"') from None
        return getattr(recorder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
