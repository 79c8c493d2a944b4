"""Whether a file gives the numbers that PyTorch gives: `largest_difference`, and running ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.checks import is_number
from decomposable.core.tree import deep_copy
from decomposable.errors import InvalidArgumentError
from decomposable.export.interface import Feeds
from decomposable.export.program import ExportError, run
from decomposable.export.quiet import refusing
from decomposable.network.calls import Call

if TYPE_CHECKING:
    import onnx

Arrays = Sequence[NDArray[np.generic]]
Run = Callable[[Feeds], Arrays]


def largest_difference(reference: Run, candidate: Run, batches: Sequence[Feeds]) -> float:
    """The largest of max |y − y'| / max(1, max |y|) over all outputs y of the reference and y' of the candidate."""
    largest, counts = 0.0, np.zeros(2, int)
    for batch in batches:
        wanted, got = reference(batch), candidate(batch)
        if [y.shape for y in wanted] != [y.shape for y in got]:
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in batch.values())
            raise ExportError(
                f"export: at a batch of {shapes} the file gives outputs of shape {[y.shape for y in got]}, "
                f"PyTorch {[y.shape for y in wanted]}"
            )
        largest = max([largest, *(difference(a, b) for a, b in zip(wanted, got, strict=True))])
        counts = counts + [[y.size, np.isfinite(y).sum()] for y in wanted]  # a row for every output
    if any(size and not finite for size, finite in np.reshape(counts, (-1, 2))):
        raise ExportError(
            "export: PyTorch gives an output that has no finite number in it, so there is nothing to compare; allowed: "
            "example_input=, a batch that gives numbers"
        )
    return largest


def torch_runner(module: nn.Module, call: Call) -> Run:
    """PyTorch, as a function of a batch."""
    return lambda batch: [as_numpy(y) for y in run(module, call, batch)]


def difference(wanted: NDArray[np.generic], got: NDArray[np.generic]) -> float:
    """How far y' is from y, max |y − y'| / max(1, max |y|); infinite where only one of the two is a finite number.

    >>> difference(np.array([1.0, 4.0]), np.array([1.0, 4.5])), difference(np.array([1.0]), np.array([np.nan]))
    (0.125, inf)
    """
    y, other = wanted.astype(np.float64), got.astype(np.float64)
    is_finite = np.isfinite(y)
    if not np.array_equal(np.where(is_finite, 0, y), np.where(np.isfinite(other), 0, other), equal_nan=True):
        return math.inf
    y, other = y[is_finite], other[is_finite]
    return float(np.abs(y - other).max() / max(1.0, np.abs(y).max())) if y.size else 0.0


def check_tolerance(tolerance: float) -> float:
    """A number that a difference can be compared with."""
    if not is_number(tolerance) or not 0 <= tolerance < math.inf:
        raise InvalidArgumentError(f"tolerance={tolerance!r}; allowed: a number of at least 0, such as 1e-4")
    return float(tolerance)


def rounding(module: nn.Module, call: Call, batches: Sequence[Feeds]) -> float:
    """How far PyTorch itself is from the exact numbers: the difference between the module and itself in float64.

    No other program can be expected to be closer to it than this.
    """
    exact = torch_runner(deep_copy(module).double(), call)

    def run_exact(batch: Feeds) -> Arrays:
        return exact({name: t.double() if t.is_floating_point() else t for name, t in batch.items()})

    return largest_difference(torch_runner(module, call), run_exact, batches)


def require_close(found: float, tolerance: float, own: float | None = None) -> None:
    """Raise where the difference is too large; `own` is PyTorch's `rounding`, where that is known."""
    if not found <= tolerance:
        of_its_own = "" if own is None else f" (PyTorch's own rounding makes {own:.2e})"
        raise ExportError(
            f"export: the outputs differ from PyTorch's by {found:.2e}{of_its_own}, and nothing was written; allowed: "
            f"at most {tolerance:g} (a float32 network, or a larger tolerance)"
        )


def onnx_runner(model: onnx.ModelProto) -> Run:
    """ONNX Runtime on the CPU, as a function of a batch; the graph is checked first."""
    import onnx

    from decomposable.edge.onnx_runtime import cpu_session

    text = "export: ONNX Runtime cannot run it on a CPU, and nothing was written"
    allowed = "; allowed: a network of types and operators that it knows, such as float32"
    with refusing(ExportError, text, allowed):
        onnx.checker.check_model(model, full_check=True)
        session = cpu_session(model.SerializeToString(), torch.get_num_threads())
        names = [value.name for value in session.get_inputs()]

    def run_session(batch: Feeds) -> Arrays:
        with refusing(ExportError, text, allowed):
            arrays: Arrays = session.run(None, {name: as_numpy(batch[name]) for name in names})
        return arrays

    return run_session


def as_numpy(tensor: Tensor) -> NDArray[np.generic]:
    """The same numbers; bfloat16, which numpy does not have, as float32."""
    array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    return array
