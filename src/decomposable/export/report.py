"""What an export says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decomposable.network.calls import INPUT, InputSpec
from decomposable_edge.sizing.chain import Rank


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, and how far it is from PyTorch.

    `largest_difference` is the largest of max |y − y'| / max(1, max |y|) over the outputs y in PyTorch and y' of the
    file, at the batch sizes of `batches` and the lengths of `lengths`. Counts are None where they are not known.

    Attributes:
        inputs: what the file takes, by name.
        left_out: inputs of the network that do not change what it gives, and which the file has not got.
        unvaried: inputs of which PyTorch ran no other values than those of the example, so that no others were tried.
        axes: the names of axes that vary besides the batch, by input and place.
        lengths: by name, the lengths that were tried of each axis that varies besides the batch.
    """

    path: Path
    format: Literal["onnx", "torch-export", "any-size"]
    macs: int | None
    params: int
    full_macs: int | None
    full_params: int
    ranks: Mapping[str, Rank] | None
    bytes: int
    inputs: Mapping[str, InputSpec]
    left_out: tuple[str, ...]
    unvaried: tuple[str, ...]
    outputs: tuple[str, ...]
    batches: tuple[int, ...]
    axes: Mapping[str, Mapping[int, str]]
    lengths: Mapping[str, tuple[int, ...]]
    largest_difference: float

    @property
    def input(self) -> InputSpec | None:
        """What the file takes, where that is one input."""
        return next(iter(self.inputs.values())) if len(self.inputs) == 1 else None

    def __str__(self) -> str:
        lines = []
        if self.macs is not None:
            part = f" ({self.macs / self.full_macs:.3f} of all)" if self.full_macs else ""
            lines.append(f"MACs: {self.macs:,}{part}")
        lines.append(f"parameters: {self.params:,} ({self.params / max(1, self.full_params):.3f} of all)")
        if list(self.inputs) != [INPUT]:
            lines.append(f"inputs: {', '.join(self.inputs)}")
        if self.left_out:
            lines.append(f"left out, because nothing that the network gives depends on it: {', '.join(self.left_out)}")
        lines.append(f"largest difference from PyTorch: {self.largest_difference:.1e} ({self._tried()})")
        if self.unvaried:
            lines.append(f"tried with the values of the example only: {', '.join(self.unvaried)}")
        lines.append(f"{self.path}: {self.bytes:,} bytes")
        return "\n".join(lines)

    def _tried(self) -> str:
        return "; ".join([f"batches of {', '.join(map(str, self.batches))}", *self._lengths()])

    def _lengths(self) -> list[str]:
        return [f"{axis} of {', '.join(map(str, sorted(tried)))}" for axis, tried in self.lengths.items()]
