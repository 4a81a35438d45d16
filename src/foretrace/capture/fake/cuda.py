"""``torch.cuda`` for scripts that ask for it: a device that is always there, whose streams and events do nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from foretrace.capture.fake.devices import own_device, python_device

Replace = Callable[[Any, str, Any], Any]
_MEMORY_BYTES = 80 << 30  # what get_device_properties says; scripts print it or choose a batch size by it


class FakeStream:
    """A stream: whatever is enqueued on it is recorded where it is issued."""

    cuda_stream = 0
    stream_id = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = own_device()

    def record_event(self, event: Any = None) -> Any:
        """An event, which has happened."""
        return FakeEvent() if event is None else event

    def is_capturing(self) -> bool:
        """False: no graph is captured."""
        return False

    def query(self) -> bool:
        """True: nothing is pending."""
        return True

    def wait_stream(self, _: Any) -> None:
        """Do nothing."""

    def wait_event(self, _: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeEvent:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Do nothing."""

    def wait(self, *_: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """True."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """One millisecond: scripts divide by it."""
        return 1.0


def patch(replace: Replace) -> None:
    """Let ``torch.cuda`` and ``torch.accelerator`` speak of devices that are not there."""
    stream = FakeStream()
    properties = SimpleNamespace(
        name="fake",
        major=9,
        minor=0,
        total_memory=_MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
        shared_memory_per_block=49152,
        gcnArchName="",
        is_integrated=False,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": int(os.environ["LOCAL_WORLD_SIZE"]),
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (_MEMORY_BYTES, _MEMORY_BYTES),
        "memory_stats": {},
        "memory_summary": "",
        "memory_snapshot": [],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [],
        "initial_seed": 0,
        "current_stream": stream,
        "default_stream": stream,
        "is_current_stream_capturing": False,
        "can_device_access_peer": True,
        "get_arch_list": ["sm_90"],
        "ipc_collect": None,
        "device": contextlib.nullcontext(),
        "stream": contextlib.nullcontext(stream),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("_lazy_init", "init", "set_device", "synchronize", "empty_cache", "set_stream"), None),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats")),
        **dict.fromkeys(("set_per_process_memory_fraction", "_lazy_call")),
    }
    for name, answer in answers.items():
        replace(torch.cuda, name, _answering(answer))
    replace(torch.cuda, "current_device", lambda: own_device().index)
    replace(torch.cuda, "Stream", FakeStream)
    replace(torch.cuda, "Event", FakeEvent)
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, name, _answering(None))
    _patch_accelerator(replace, answers)
    _patch_tensors(replace)
    _patch_fsdp(replace)


def _answering(answer: Any) -> Any:
    return lambda *_, **__: answer


def _patch_accelerator(replace: Replace, answers: dict[str, Any]) -> None:
    replace(torch._C, "_get_accelerator", _answering(torch.device("cuda")))
    for name in ("is_available", "device_count", "synchronize", "current_stream", "set_stream", "empty_cache"):
        if hasattr(torch.accelerator, name):
            replace(torch.accelerator, name, _answering(answers[name]))
    for name in ("current_device_index", "current_device_idx"):
        if hasattr(torch.accelerator, name):
            replace(torch.accelerator, name, lambda: own_device().index)
    for name in ("set_device_index", "set_device_idx"):
        if hasattr(torch.accelerator, name):
            replace(torch.accelerator, name, _answering(None))
    replace(torch.accelerator, "current_accelerator", _answering(torch.device("cuda")))


def _patch_tensors(replace: Replace) -> None:
    """Moves to "cuda": the device gets its index, and a tensor that is there already stays what it is."""
    old_to = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place = args[0] if args else kwargs.get("device")
        device = _cuda_device(place)
        if device is None:
            return old_to(self, *args, **kwargs)
        if self.device != device:
            if args:
                return old_to(self, device, *args[1:], **kwargs)
            return old_to(self, **{**kwargs, "device": device})
        kwargs.pop("device", None)
        wants_more = len(args) > 1 or any(name in kwargs for name in ("dtype", "memory_format", "copy"))
        return old_to(self, *args[1:], **kwargs) if wants_more else self

    def cuda(self: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return to(self, own_device() if device is None else device)

    def pin_memory(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    replace(torch.Tensor, "to", to)
    replace(torch.Tensor, "cuda", cuda)
    replace(torch.Tensor, "pin_memory", pin_memory)
    replace(torch.Tensor, "record_stream", lambda *_: None)
    # Tensors that wrap a fake one (DTensor) know of the device that C++ was told.
    old_device = torch.Tensor.device.__get__
    replace(torch.Tensor, "device", property(lambda self: python_device(old_device(self))))
    replace(torch.Tensor, "is_cuda", property(lambda self: self.device.type == "cuda"))
    replace(torch, "Generator", _Generator)


def _cuda_device(place: Any) -> torch.device | None:
    """The device that an argument names, if that is a CUDA device."""
    if isinstance(place, bool) or not isinstance(place, str | int | torch.device):
        return None
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    if device.type != "cuda":
        return None
    return own_device() if device.index is None else device


class _Generator(torch._C.Generator):
    """A random number generator; one "on cuda" lives on the host here."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _patch_fsdp(replace: Replace) -> None:
    """The first FSDP takes its device as a number, which C++ takes for one of the accelerator that it knows."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.fsdp import _init_utils

        old = _init_utils._get_device_from_device_id

        def device_from_id(*args: Any, **kwargs: Any) -> torch.device | None:
            device = old(*args, **kwargs)
            return None if device is None else python_device(device)

        replace(_init_utils, "_get_device_from_device_id", device_from_id)
