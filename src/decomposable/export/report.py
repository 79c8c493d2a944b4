"""What an export says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decomposable.parts import InputSpec

Format = Literal["onnx", "torch-export", "any-size"]


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written, and how far it is from PyTorch.

    `largest_difference` is the largest of max |y − y'| / max(1, max |y|) over the outputs y in PyTorch and y' of the
    file, at the batch sizes of `batches`. Counts are None where they are not known.
    """

    path: Path
    format: Format
    macs: int | None
    params: int
    full_macs: int | None
    full_params: int
    ranks: Mapping[str, int] | None
    bytes: int
    input: InputSpec
    outputs: tuple[str, ...]
    batches: tuple[int, ...]
    largest_difference: float

    def __str__(self) -> str:
        lines = []
        if self.macs is not None:
            part = f" ({self.macs / self.full_macs:.3f} of all)" if self.full_macs else ""
            lines.append(f"MACs: {self.macs:,}{part}")
        lines.append(f"parameters: {self.params:,} ({self.params / max(1, self.full_params):.3f} of all)")
        lines.append(f"largest difference from PyTorch: {self.largest_difference:.1e} ({self._tried()})")
        lines.append(f"{self.path}: {self.bytes:,} bytes")
        return "\n".join(lines)

    def _tried(self) -> str:
        return f"batches of {', '.join(map(str, self.batches))}"
