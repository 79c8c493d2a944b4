"""How a network is called: what its inputs are, where in a batch they lie, and which arguments they become.

    batch {"ids": a, "mask": b, "label": c} ── picked ──▶ {"ids": a, "mask": b} ── run ──▶ net(a, attention_mask=b)

`capture.py` finds it out by watching a pass. By default a network is called with the first entry of a batch, and its
one input is called "input".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.tracing import Entry, first_entry, map_entries
from decomposable_edge.errors import InvalidArgumentError

INPUT = "input"
"""What the one input of a network is called that takes the first entry of a batch."""

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What a network takes: the shape of one sample, without the batch, and the name of the type.

    `values` are the smallest and the largest whole number that it may be given, where it takes whole numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, batch: Any) -> InputSpec | None:
        """That of an example input: a tensor, or a batch whose first entry is one; None for anything else."""
        first = first_entry(batch)
        return cls.of_tensor(first) if isinstance(first, Tensor) and first.dim() > 0 else None

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> InputSpec:
        """That of a batch of samples."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype not in _WHOLE or not tensor.numel() or tensor.is_meta:
            return cls(shape=tuple(tensor.shape[1:]), dtype=dtype)
        least, most = (int(value) for value in torch.aminmax(tensor))
        return cls(shape=tuple(tensor.shape[1:]), dtype=dtype, values=(min(0, least), max(0, most)))

    def example(self, batch: int, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """A batch of this kind, the same one every time: normal numbers, or those of `values` where they are whole.

        >>> InputSpec(shape=(3, 8, 8), dtype="float32").example(2).shape
        torch.Size([2, 3, 8, 8])
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            return torch.randn(batch, *self.shape, generator=generator).to(device, dtype)
        least, most = self.values
        return torch.randint(least, most + 1, (batch, *self.shape), generator=generator).to(device, dtype)


@dataclass(frozen=True)
class Slot:
    """The place of an input among the arguments of a call."""

    name: str


@dataclass(frozen=True, kw_only=True)
class CallSignature:
    """How a network is called.

    Attributes:
        inputs: what they are, by name, in the order of the arguments.
        entries: where in a batch each lies; the default is the first entry.
        args, kwargs: the arguments, with a `Slot` wherever an input goes; all else in them is always the same.
    """

    inputs: Mapping[str, InputSpec]
    entries: Mapping[str, Entry] | None = None
    args: tuple[Any, ...] = (Slot(INPUT),)
    kwargs: Mapping[str, Any]

    @classmethod
    def with_first(cls, spec: InputSpec) -> CallSignature:
        """The default: with the first entry of a batch and nothing else."""
        return cls(inputs={INPUT: spec}, kwargs={})

    @property
    def is_default(self) -> bool:
        """Whether it is the default."""
        return self.entries is None

    def picked(self, batch: Any) -> dict[str, Any]:
        """The inputs in a batch, by name."""
        if self.entries is None:
            return {INPUT: first_entry(batch)}
        return {name: _at(batch, entry) for name, entry in self.entries.items()}

    def run(self, net: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """What the network gives for these inputs."""

        def filled(value: Any, _: Entry) -> Any:
            return inputs[value.name] if isinstance(value, Slot) else value

        return net(*map_entries(filled, self.args), **map_entries(filled, self.kwargs))

    def forward(self, net: nn.Module, batch: Any) -> Any:
        """What the network gives for a batch, as ``forward(net, batch)`` of `decompose` does."""
        return self.run(net, self.picked(batch))

    def example(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Made-up inputs of so many samples, the same ones every time."""
        return {name: spec.example(batch, device, seed) for seed, (name, spec) in enumerate(self.inputs.items())}


def _at(batch: Any, entry: Entry) -> Any:
    found = batch
    for key in entry:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            where = "".join(f"[{part!r}]" for part in entry)
            raise InvalidArgumentError(
                f"batch: it has no entry {where}, which the network takes; allowed: one made as the example input was"
            ) from None
    return found
