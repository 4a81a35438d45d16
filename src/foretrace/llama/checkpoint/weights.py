"""`Checkpoint`: a model on disk, its weights under Meta's names and read one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from foretrace.llama.config import LlamaConfig
from foretrace.llama.model import Llama
from foretrace.trace.reading import FormatError

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for and kept by nobody.

    Args:
        names: in the order of the model.
        read: gives one of them.
    """

    def __init__(self, names: tuple[str, ...], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        folder: where it lies.
        config: of the model.
        weights: by the names of `model.Llama`, in its order; a tied head is not among them.
        dtype: of the embedding.
        tokenizer: its ``tokenizer.model``, if there is one.
        notes: what was left out or assumed, counted.
    """

    folder: Path
    config: LlamaConfig
    weights: Mapping[str, Tensor]
    dtype: torch.dtype
    tokenizer: Path | None = None
    notes: Counter[str] = field(default_factory=Counter)

    def model(self, dtype: torch.dtype | None = None) -> Llama:
        """The model with these weights, on the CPU.

        Args:
            dtype: of the weights; that of the checkpoint if None.
        """
        with torch.device("meta"):
            model = Llama(self.config)
        model = model.to_empty(device="cpu").to(dtype or self.dtype)
        if self.config.sizes.is_tied and model.output is not None and model.tok_embeddings is not None:
            model.output.weight = model.tok_embeddings.weight  # to_empty has parted them
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, weight in self.weights.items():
                parameters[name].copy_(weight)
        return model


def of_model(model: Llama, folder: Path = Path("model"), tokenizer: Path | None = None) -> Checkpoint:
    """A model in memory as if it lay on disk, to be written."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in weights.items()}
    return Checkpoint(folder, model.config, weights, weights[EMBEDDING].dtype, tokenizer)


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by Meta's names and in the order of the model; a tied head is not among them."""
    with torch.device("meta"):
        model = Llama(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_shapes(found: Mapping[str, tuple[int, ...]], config: LlamaConfig, source: str) -> None:
    """Compare what a file holds with what its config says.

    Raises:
        FormatError: at the first tensor that is missing or has another shape.
    """
    for name, shape in shapes(config).items():
        if name not in found:
            raise FormatError(source, f"{name} is missing", "get the missing files of the checkpoint")
        if found[name] != shape:
            problem = f"{name} has shape {found[name]}, its configuration says {shape}"
            raise FormatError(source, problem, "take the configuration that belongs to these weights")
