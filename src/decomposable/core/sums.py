"""Σ x xᵀ over batches: the second moment of one side of a layer, and how far it can be believed.

A side of more than `WIDEST` entries, such as the outputs of a language model, has a moment of blocks along its
diagonal: what is outside of them is left out, so that memory and time grow with the width, not with its square.

A moment S of few images has directions that none of them used. They look free, and are not: other images use them.
Before any image is seen all directions are alike, μ1 with μ the mean of the diagonal, in which a layer is cut as its
singular values say. The mixture

    (1 − ρ) S + ρ μ 1        ρ = E‖S − Σ‖² / E‖S − μ1‖²

is the nearest one to the moment Σ of endless data (Ledoit and Wolf, 2004). The numerator is the expected error, which
the batches tell by how much they differ: positions of one image are not independent, batches are.

Shape suffixes: B images; P positions; M as in `forms`; D blocks, of W entries each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from decomposable.core.svd import most_precise

WIDEST = 4096
"""Entries of a side whose moment is kept whole."""

BLOCK = 512
"""Entries of a block, where a side is wider than that."""


def blocks_of(width: int) -> tuple[int, int]:
    """Return how many blocks the moment of a side has, and how wide they are.

    >>> blocks_of(1000), blocks_of(50_000)
    ((1, 1000), (98, 512))
    """
    return (1, width) if width <= WIDEST else (-(-width // BLOCK), BLOCK)


def bytes_of(widths: Iterable[int]) -> int:
    """Return what the moments of these sides take, twice in float32: the sum and the current batch's, or a root."""
    return sum(8 * count * block**2 for count, block in map(blocks_of, widths))


def grouped(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names in groups whose sizes fit in the most; one that fits in none has a group of its own."""
    groups: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not groups or size > left:
            groups.append([])
            left = most
        groups[-1].append(name)
        left -= size
    return groups


@dataclass(frozen=True)
class Spread:
    """Hold what the batches c of a moment weigh, w_c, and how much they differ: Σ w_c, Σ w_c² and Σ w_c² ‖S_c‖²."""

    weight: float = 0.0
    squared_weights: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Spread) -> Spread:
        return Spread(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> float:
        """Return what a sum is divided by to be a mean."""
        return max(1.0, self.weight)

    def error(self, mean: Tensor) -> float:
        """Return the expected squared distance of the mean S to the moment of endless data.

        With weights whose sum is 1 that is Σ w_c² ‖S_c − S‖² / (1 − Σ w_c²): by how much batches differ, over how many
        there are. It is infinite where one batch says nothing about that.
        """
        shares = self.squared_weights / self.total**2
        spread = self.squares / self.total**2 - shares * _squared(mean)
        return max(0.0, spread) / (1 - shares) if shares < 1 - 1e-9 else math.inf


@dataclass(frozen=True, eq=False)
class Moments:
    """Hold A (M × M), and G (N × N) where a loss was given, of one layer's matrix; float32. Of a wide side, its blocks
    (D × W × W), the last one filled up with zeros.

    The errors are the expected squared Frobenius distances to the moments of endless data, and come from the spreads.
    """

    inputs: Tensor
    gradients: Tensor | None = None
    errors: tuple[float, ...] = (0.0, 0.0)
    spreads: tuple[Spread, ...] = ()

    @classmethod
    def of(cls, *sides: tuple[Tensor, Spread]) -> Moments:
        """Return the moments of the inputs and, where they are given, of the gradients, with their errors."""
        means, spreads = zip(*sides, strict=True)
        errors = tuple(spread.error(mean) for mean, spread in sides)
        return cls(means[0], means[1] if len(means) > 1 else None, errors, spreads)

    @property
    def sides(self) -> tuple[Tensor, ...]:
        """Return the sums of both sides, as far as there are any."""
        return (self.inputs,) if self.gradients is None else (self.inputs, self.gradients)

    def joined(self, other: Moments) -> Moments:
        """Return what one pass over the batches of both would have given."""
        sides = []
        for mine, theirs, spread, others in zip(self.sides, other.sides, self.spreads, other.spreads, strict=True):
            both = spread + others
            sides.append((mine * (spread.weight / both.total) + theirs * (others.weight / both.total), both))
        return Moments.of(*sides)


class Sum:
    """Sum x xᵀ of one side of a layer, and how much its batches differ."""

    def __init__(self, width: int, device: torch.device, *, is_centred: bool = False) -> None:
        self.width, self.spread = width, Spread()
        count, block = blocks_of(width)
        self.total = torch.zeros(count, block, block, device=device)
        self.part = torch.zeros_like(self.total)  # of the batch under way
        self.positions = 0  # of the same
        self.centre = torch.zeros(count * block, device=device) if is_centred else None  # the sum of its x

    def add(self, x_BMP: Tensor, positions: int) -> None:
        """Add what some images have: columns that stand for so many positions of each of them."""
        share = positions / x_BMP.shape[2]
        self.positions += x_BMP.shape[0] * positions
        if self.centre is not None:
            self.centre[: self.width] += share * x_BMP.sum(dim=(0, 2))
        x_BMP = x_BMP * share**0.5 if share != 1 else x_BMP
        count, block, _ = self.part.shape
        if count == 1:
            self.part[0].addbmm_(x_BMP, x_BMP.mT)
        else:
            x_DWP = F.pad(x_BMP, (0, 0, 0, count * block - self.width)).movedim(1, 0).reshape(count, block, -1)
            self.part.baddbmm_(x_DWP, x_DWP.mT)

    def end_batch(self, weight: float | None = None) -> None:
        """End the batch under way; it weighs as much as it has positions, or this."""
        weight = self.positions if weight is None else weight
        if self.centre is not None and self.positions:
            centre_DW = self.centre.view(self.part.shape[:2])
            self.part.baddbmm_(centre_DW[:, :, None], centre_DW[:, None, :], alpha=-1 / self.positions)
            self.centre.zero_()
        self.spread += Spread(weight, weight**2, _squared(self.part))
        self.total += self.part
        self.part.zero_()
        self.positions = 0

    def mean(self) -> tuple[Tensor, Spread]:
        """Return the moment, a matrix where it is whole, and how much its batches differ."""
        mean = self.total.div_(self.spread.total)
        return (mean[0] if len(mean) == 1 else mean), self.spread


def _squared(blocks: Tensor) -> float:
    return float(torch.linalg.vector_norm(blocks, dtype=most_precise(blocks.device))) ** 2


def shrunk(moments: Moments) -> Moments:
    """Return the moments as far as they can be believed."""
    return _changed(moments, shrunk_moment)


def of_weights(moments: Moments) -> Moments:
    """Return moments of the same size that know no direction: a layer is cut as its singular values say."""
    return _changed(moments, lambda moment, error: _mixed(moment, 1.0))


def _changed(moments: Moments, change: Callable[[Tensor, float], Tensor]) -> Moments:
    inputs, *gradients = (change(*side) for side in zip(moments.sides, moments.errors, strict=False))
    return replace(moments, inputs=inputs, gradients=gradients[0] if gradients else None)


def shrunk_moment(moment: Tensor, error: float) -> Tensor:
    """Return (1 − ρ) S + ρ μ 1.

    >>> shrunk_moment(torch.diag(torch.tensor([4.0, 0.0])), 4.0)  # ‖S − μ1‖² is 8
    tensor([[3., 0.],
            [0., 1.]])
    """
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    apart = float(moment.double().square().sum()) - diagonal.numel() * float(diagonal.mean()) ** 2  # ‖S − μ1‖²
    return _mixed(moment, min(1.0, error / apart) if apart > 0 else 0.0)


def _mixed(moment: Tensor, share: float) -> Tensor:
    mixed = moment * (1 - share)
    mixed.diagonal(dim1=-2, dim2=-1).add_(share * moment.diagonal(dim1=-2, dim2=-1).mean())
    return mixed
