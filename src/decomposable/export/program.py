"""The first half of every export: a module as a `torch.export` program, whose batch may vary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.export.quiet import quiet, reason
from decomposable.parts import InputSpec
from decomposable.tree import deep_copy, rewire, unwrap

_TRACED_BATCH = 2  # a batch of one would be taken for a constant


class ExportError(DecomposableError):
    """A network cannot be exported, or what came out is not the same network."""


class FixedBatchError(ExportError):
    """A network runs at one batch size only."""


@torch.inference_mode(False)  # tensors made in that mode cannot be traced
def ready(module: nn.Module) -> nn.Module:
    """A copy on the CPU in eval mode: the module may be in training, on another device, or compiled.

    Its weights lie as usual: channels last is for PyTorch's own kernels, and would be traced as steps of its own.
    """
    plain = deep_copy(rewire(unwrap(module), {})).cpu().eval().requires_grad_(False)
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data = tensor.data.contiguous()
    return plain


def run(module: nn.Module, batch: Tensor) -> list[Tensor]:
    """All tensors that a module returns, in order; None among them is left out, as in an exported file."""
    return _tensors(_returned(module, batch))


def output_names(module: nn.Module, batch: Tensor) -> tuple[str, ...]:
    """What the outputs are called: as in the dict that the model returns; else output, or output_0, output_1 and on."""
    returned = _returned(module, batch)
    count = len(_tensors(returned))
    if isinstance(returned, Mapping):
        names = tuple(key for key, value in returned.items() if value is not None)
        if len(names) == count and all(isinstance(name, str) and name not in ("", "input") for name in names):
            return names
    return ("output",) if count == 1 else tuple(f"output_{i}" for i in range(count))


@torch.no_grad()
def _returned(module: nn.Module, batch: Tensor) -> Any:
    try:
        return module(batch)
    except Exception as error:  # code of somebody else
        raise InvalidArgumentError(
            f"example_input: the model cannot run a batch of shape {tuple(batch.shape)} and type {batch.dtype} "
            f"({reason(error)})"
        ) from error


def _tensors(returned: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(returned) if leaf is not None]
    for leaf in found:
        if not isinstance(leaf, Tensor):
            raise ExportError(f"export: the model returns a value of type {type(leaf).__name__}; allowed: tensors")
    if not found:
        raise ExportError("export: the model returns no tensor; allowed: one or more")
    return found


def to_program(module: nn.Module, input: InputSpec, *, batch: int | None = None) -> ExportedProgram:
    """What `torch.export` makes of a module that is `ready`: for any batch size or, where it is given, for that one."""
    try:
        return _traced(module, input.example(batch or _TRACED_BATCH), is_dynamic=batch is None)
    except Exception as error:  # in whatever words the exporter refuses a model
        if batch is None and _is_static(module, input):
            raise FixedBatchError(
                f"export: the model's code fixes the size of the batch ({reason(error)}); allowed: batch=1 or another "
                "number, for a file that takes this one only"
            ) from error
        raise ExportError(f"export: torch.export cannot trace the model ({reason(error)})") from error


def _is_static(module: nn.Module, input: InputSpec) -> bool:
    """Whether it can be traced, but not for all batch sizes at once."""
    for batch in (_TRACED_BATCH, 1):
        try:
            _traced(module, input.example(batch), is_dynamic=False)
        except Exception:
            continue
        return True
    return False


@torch.inference_mode(False)
def _traced(module: nn.Module, example: Tensor, *, is_dynamic: bool) -> ExportedProgram:
    shapes: Any = ({0: Dim("batch")},) if is_dynamic else None
    with quiet(), torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes=shapes, strict=False)
