"""Whether a file gives the numbers that PyTorch gives: the batches to try it with, running it, and the difference.

An exporter takes what is always the same for a constant. So a file is tried with the example, with other sizes, and
with rows that differ from the example in every input, such as padded ones where it has a mask of ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.tree import deep_copy
from decomposable.export.interface import Feeds, Interface, resized
from decomposable.export.program import ExportError, run
from decomposable.export.quiet import refusing
from decomposable.export.report import Counts
from decomposable.network.calls import CallSignature, InputSpec
from decomposable_edge.checks import is_number
from decomposable_edge.errors import InvalidArgumentError

if TYPE_CHECKING:
    import onnx

Arrays = Sequence[NDArray[np.generic]]
Run = Callable[[Feeds], Arrays]

BATCHES = (1, 2, 5)
"""The sizes of batches that are tried besides that of the example."""


def largest_difference(reference: Run, candidate: Run, batches: Sequence[Feeds]) -> float:
    """Return the largest `difference` over all outputs of the reference and of the candidate."""
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


def torch_runner(module: nn.Module, call: CallSignature) -> Run:
    """Return PyTorch, as a function of a batch."""
    return lambda batch: [as_numpy(y) for y in run(module, call, batch)]


def difference(wanted: NDArray[np.generic], got: NDArray[np.generic]) -> float:
    """Return max |y − y'| / max(1, max |y|); infinite where only one of the two is a finite number.

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
    """Return the tolerance as a float, if it is a number of at least 0."""
    if not is_number(tolerance) or not 0 <= tolerance < math.inf:
        raise InvalidArgumentError(f"tolerance={tolerance!r}; allowed: a number of at least 0, such as 1e-4")
    return float(tolerance)


def rounding(module: nn.Module, call: CallSignature, batches: Sequence[Feeds]) -> float:
    """Return how far PyTorch is from itself in float64: no other program can be expected to be closer to it."""
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
    """Return ONNX Runtime on the CPU, as a function of a batch. The graph is checked first."""
    import onnx

    from decomposable_edge.onnx_runtime import cpu_session

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
    """Return the same numbers; bfloat16, which numpy does not have, as float32."""
    array: NDArray[np.generic] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    return array


@dataclass(frozen=True, kw_only=True, eq=False)
class Trials:
    """What a file is tried with."""

    example: Feeds | None  # the example batch itself, where it is known
    batches: tuple[Feeds, ...]  # others, of other sizes, rows and lengths
    varied: Feeds  # the one of them that differs from the example in every input
    lengths: Mapping[str, tuple[int, ...]]  # of each axis that varies
    unvaried: tuple[str, ...]  # inputs of which PyTorch runs no other values than those of the example

    @property
    def all(self) -> tuple[Feeds, ...]:
        """Return all batches."""
        return self.batches if self.example is None else (self.example, *self.batches)

    @property
    def one_row(self) -> Feeds:
        """Return one row that differs from the example."""
        return {name: tensor[:1] for name, tensor in self.varied.items()}

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the sizes of the batches."""
        return tuple(sorted({len(next(iter(batch.values()))) for batch in self.all}))


def trials_of(module: nn.Module, interface: Interface, rows: Feeds | None, counts: Sequence[int] = BATCHES) -> Trials:
    """Return what to try a file with; `rows` are those of the example input, where they are known."""
    counts = counts if interface.batch is None else (interface.batch,)
    known = interface.rows(rows, max(counts)) if rows is None else rows
    example = rows if interface.batch in (None, len(next(iter(known.values())))) else None
    varied, unvaried = _varied(module, interface, known, max(counts))
    batches: list[Feeds] = [*(interface.rows(known, count) for count in counts), varied]
    lengths: dict[str, tuple[int, ...]] = {}
    for axis, length in interface.lengths.items():
        tried = _other_lengths(module, interface, varied, axis, length)
        batches += tried.values()
        lengths[axis] = (length, *tried)
    return Trials(example=example, batches=tuple(batches), varied=varied, lengths=lengths, unvaried=unvaried)


def reported(counts: Counts, interface: Interface, trials: Trials, difference: float) -> dict[str, Any]:
    """Return what a report says of a network's costs, of the inputs, and of what they were tried with."""
    return {
        **vars(counts),
        "inputs": {name: interface.call.inputs[name] for name in interface.names},
        "left_out": interface.left_out,
        "unvaried": trials.unvaried,
        "batches": trials.counts,
        "axes": {name: dict(interface.axes[name]) for name in interface.names if name in interface.axes},
        "lengths": dict(trials.lengths),
        "largest_difference": difference,
    }


def _varied(module: nn.Module, interface: Interface, rows: Feeds, count: int) -> tuple[Feeds, tuple[str, ...]]:
    """Return rows that differ from the example in every input, and the inputs of which no other values run."""
    batch, failed = interface.rows(rows, count), []
    for seed, (name, spec) in enumerate(interface.call.inputs.items()):
        found = None
        for other in _other_values(batch[name], spec, seed + 1):
            candidate = {**batch, name: other}
            outputs = _outputs(module, interface, candidate)
            is_finite = outputs is not None and all(bool(y.isfinite().all()) for y in outputs)
            if is_finite or (found is None and outputs is not None):
                found = candidate
            if is_finite:
                break
        if found is None:
            failed.append(name)
        batch = found or batch
    return batch, tuple(failed)


def _other_values(tensor: Tensor, spec: InputSpec, seed: int) -> Iterator[Tensor]:
    """Make other values of the same kind. The first of several in a row stays, so that no mask is empty."""
    generator = torch.Generator().manual_seed(seed)
    if not tensor.numel():
        return
    rows = tensor.reshape(len(tensor), -1)
    for made in _drawn(rows, spec, generator):
        if rows.shape[1] > 1:
            made[:, 0] = rows[:, 0]
        if not torch.equal(made, rows):
            yield made.reshape(tensor.shape)


def _drawn(rows: Tensor, spec: InputSpec, generator: torch.Generator) -> Iterator[Tensor]:
    noise = torch.randn(rows.shape, generator=generator)
    shuffled = rows.flatten()[noise.flatten().argsort()].reshape(rows.shape)  # the same numbers in other places
    if rows.dtype.is_floating_point:
        yield shuffled
        yield torch.where(noise > 0, rows, 0).to(rows.dtype)
        yield noise.to(rows.dtype)
        return
    least, most = spec.values[0], max(spec.values[1], spec.values[0] + 1)
    drawn = torch.randint(least, most + 1, rows.shape, generator=generator)
    is_same = (drawn == rows)[:, min(1, rows.shape[1] - 1) :].all(1)
    drawn[is_same] = least + most - rows[is_same].long()  # no row is left as it is by chance
    yield drawn.to(rows.dtype)
    yield shuffled


def _other_lengths(module: nn.Module, interface: Interface, batch: Feeds, axis: str, length: int) -> dict[int, Feeds]:
    """Return the batch with an axis shorter and longer, as far as the module runs it."""
    found: dict[int, Feeds] = {}
    for other in (length + 3, length // 2, 2 * length, length - 1):
        if other > 1 and other != length and len(found) < 2:
            candidate = resized(batch, interface.axes, len(next(iter(batch.values()))), {axis: other})
            if _outputs(module, interface, candidate) is not None:
                found[other] = candidate
    if not found:
        raise ExportError(
            f"export: the model runs no other '{axis}' than {length}; allowed: dynamic= without it, or another "
            "example_input"
        )
    return found


def _outputs(module: nn.Module, interface: Interface, batch: Feeds) -> list[Tensor] | None:
    """Return what the module gives for a batch; None where it cannot run it."""
    try:
        return run(module, interface.call, batch)
    except InvalidArgumentError:
        return None
