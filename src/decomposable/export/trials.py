"""The batches that a file is tried with: the example itself, other sizes, and rows that differ in every input.

An exporter takes for a constant what is always the same in what it is shown. So rows are made that differ from the
example in every input, such as padded ones where it has a mask of ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decomposable.errors import InvalidArgumentError
from decomposable.export.interface import Feeds, Interface, resized
from decomposable.export.program import ExportError, run
from decomposable.network.calls import InputSpec

BATCHES = (1, 2, 5)
"""The sizes of batches that are tried besides that of the example."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trials:
    """What a file is tried with.

    Attributes:
        example: the example batch itself; None where none is known.
        batches: others, of other sizes, rows and lengths.
        lengths: the lengths of each axis that varies.
        unvaried: inputs of which PyTorch runs no other values than those of the example.
    """

    example: Feeds | None
    batches: tuple[Feeds, ...]
    lengths: Mapping[str, tuple[int, ...]]
    unvaried: tuple[str, ...]

    @property
    def all(self) -> tuple[Feeds, ...]:
        """All of them."""
        return self.batches if self.example is None else (self.example, *self.batches)

    @property
    def counts(self) -> tuple[int, ...]:
        """The sizes of the batches."""
        return tuple(sorted({len(next(iter(batch.values()))) for batch in self.all}))


def trials_of(module: nn.Module, interface: Interface, rows: Feeds | None, counts: Sequence[int] = BATCHES) -> Trials:
    """What to try a file with; `rows` are those of the example input, where they are known."""
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
    return Trials(example=example, batches=tuple(batches), lengths=lengths, unvaried=unvaried)


def _varied(module: nn.Module, interface: Interface, rows: Feeds, count: int) -> tuple[Feeds, tuple[str, ...]]:
    """Rows that differ from the example in every input, and the inputs of which the module runs no other values."""
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
    """Other values of the same kind. The first one of every row stays, where there are more: no mask is empty."""
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
    """The batch with an axis shorter and longer, as far as the module runs it."""
    found: dict[int, Feeds] = {}
    for other in (length + 3, length // 2, 2 * length, length - 1):
        candidate = resized(batch, interface.axes, len(next(iter(batch.values()))), {axis: other}) if other > 1 else {}
        is_new = len(found) < 2 and bool(candidate) and other != length
        if is_new and _outputs(module, interface, candidate) is not None:
            found[other] = candidate
    if not found:
        raise ExportError(
            f"export: the model runs no other '{axis}' than {length}; allowed: dynamic= without it, or another "
            "example_input"
        )
    return found


def _outputs(module: nn.Module, interface: Interface, batch: Feeds) -> list[Tensor] | None:
    """What the module gives for a batch; None where it cannot run it."""
    try:
        return run(module, interface.call, batch)
    except InvalidArgumentError:
        return None
