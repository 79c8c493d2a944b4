"""Files of tensors in PyTorch: `decomposable_edge.file` says what lies in one, and why nothing in it is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file import container
from decomposable_edge.file.container import FORMAT as FORMAT
from decomposable_edge.file.container import FilePath as FilePath
from decomposable_edge.file.header import DTYPES

DTYPE_NAMES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES.values()}
"""The types that can be stored, by name."""

Container = container.Container[Tensor]
Stored = container.Stored[Tensor]


class InTorch:
    """Tensors in memory of their own, with the strides that they had."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return one without content; flags are bytes here."""
        return torch.empty(shape, dtype=torch.uint8 if dtype == "bool" else DTYPE_NAMES[dtype], device="cpu")

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """Return its bytes, not copied."""
        return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")

    def filled(self, tensor: Tensor, dtype: str, strides: Sequence[int] | None) -> Tensor:
        """Return what it is once its bytes are there."""
        plain = tensor.ne(0) if dtype == "bool" else tensor
        return plain if strides is None else like(strides, plain)


def as_json(option: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict as JSON gives it back: tuples are lists, keys are text; refuse what JSON cannot hold."""
    if not isinstance(value, Mapping):
        raise InvalidArgumentError.about(option, value, "a dict")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
        return plain
    except (TypeError, ValueError, RecursionError) as error:
        why = f"it cannot be written as JSON ({error})"
        allowed = "dicts with text as keys, lists, text, finite numbers, True, False and None"
        raise InvalidArgumentError.about(option, value, allowed, why=why) from error


def write_container(path: FilePath, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Write the file at once or not at all, and return its size; `description` is JSON-able."""
    strides = {name: list(tensor.stride()) for name, tensor in tensors.items() if _lies_otherwise(tensor)}
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), InTorch().bytes_of(tensor))
        for name, tensor in stored.items()
    }
    return container.write(path, description, plain, strides)


def open_container(path: FilePath) -> AbstractContextManager[Container]:
    """Open a file to read from it; whatever is found to be damaged meanwhile is an `ArtifactError` with its name."""
    return container.opened(path, InTorch())


def read_container(path: FilePath) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and all tensors of a file; raise `ArtifactError` where a checksum is wrong."""
    with open_container(path) as found:
        return found.description, found.read_all()


def outline_of(stored: Stored) -> Tensor:
    """Return the tensor without its content, on the meta device: shape, type and strides."""
    dtype = DTYPE_NAMES[stored.dtype]
    if stored.strides is None:
        return torch.empty(stored.shape, dtype=dtype, device="meta")
    return torch.empty_strided(stored.shape, stored.strides, dtype=dtype, device="meta")


def like(strides: Sequence[int], plain: Tensor) -> Tensor:
    """Return the tensor laid out in memory by these strides; itself where it is so already."""
    if plain.stride() == tuple(strides):
        return plain
    return torch.empty_strided(plain.shape, strides, dtype=plain.dtype).copy_(plain)


def _lies_otherwise(tensor: Tensor) -> bool:
    usual = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() != usual and container.is_dense(tensor.shape, tensor.stride())
