"""What an export says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decomposable.network.calls import INPUT, InputSpec
from decomposable_edge.sizing.chain import Rank
from decomposable_edge.sizing.plans import RankPlan


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a network costs at a size and in full. MACs are None where nobody knows them, ranks where it has none."""

    macs: int | None
    params: int
    full_macs: int | None
    full_params: int
    ranks: Mapping[str, Rank] | None

    @classmethod
    def of(cls, plan: RankPlan, *, has_macs: bool = True) -> Counts:
        """Return the counts of a plan."""
        macs, full_macs = (plan.macs, plan.full_macs) if has_macs else (None, None)
        params = {"params": plan.params, "full_params": plan.full_params}
        return cls(macs=macs, full_macs=full_macs, ranks=dict(plan.ranks), **params)


@dataclass(frozen=True, kw_only=True)
class ExportReport(Counts):
    """What was written, and how far it is from PyTorch.

    `largest_difference` is the largest of max |y − y'| / max(1, max |y|) over the outputs y of PyTorch and y' of the
    file, at the batch sizes of `batches` and the lengths of `lengths`.

    Attributes:
        inputs: what the file takes, by name.
        left_out: inputs that the network ignores; the file has not got them.
        unvaried: inputs that were tried with the values of the example only: PyTorch ran no others.
        axes: the names of axes that vary besides the batch, by input and place.
        lengths: by name, the lengths of these axes that were tried.
    """

    path: Path
    format: Literal["onnx", "torch-export", "any-size"]
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
        """Return the shape of the one input of the file."""
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
        tried = [self._tried(), *(f"{axis} of {_listed(sorted(each))}" for axis, each in self.lengths.items())]
        lines.append(f"largest difference from PyTorch: {self.largest_difference:.1e} ({'; '.join(tried)})")
        if self.unvaried:
            lines.append(f"tried with the values of the example only: {', '.join(self.unvaried)}")
        return "\n".join([*lines, f"{self.path}: {self.bytes:,} bytes"])

    def _tried(self) -> str:
        return f"batches of {_listed(self.batches)}"


@dataclass(frozen=True, kw_only=True)
class AnySizeReport(ExportReport):
    """What was written; `sizes` are the parts of the original at which it was compared with PyTorch."""

    sizes: tuple[float, ...]

    def _tried(self) -> str:
        return f"at {_listed(f'{size:.3g}' for size in dict.fromkeys(self.sizes))} of the original"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
