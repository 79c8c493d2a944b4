"""How far the output of a layer moves when its weight is cut: by rank, and by width (proposition 1, figure 2f).

With W = U S Vᵀ, cutting a layer to rank r moves its output at one position by

    y − ŷ(r) = Σ_{i>r} σ_i (u_iᵀ x) v_i ,        ‖y − ŷ(r)‖² = Σ_{i>r} (σ_i u_iᵀ x)² ,

because the v_i are orthonormal: it never rises with r. That holds for linear layers and the channel form. In the
spatial form v_i lies over the vertical taps of the kernel, and a pixel of the output sums what several rows add to it.
Before that sum the formula holds as it stands; behind it, terms of different bases can cancel, and the error of the
output may rise with the rank.

Shape suffixes: B images; K bases; M rows of the matrix; P positions; O, H, W, T output channels, rows, columns, taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.forms import matrix_form, matrix_shape, to_matrix
from decomposable.core.layers import Convolution, FilterFn, Layer
from decomposable.core.moments import input_patches, padded_extents
from decomposable.core.svd import SVD, svd
from decomposable.core.tracing import Forward, call_with_first
from decomposable.network.calibration.batches import renewable
from decomposable_edge.checks import check_count, is_number
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Axes
from decomposable_lab.analysis.watching import See, layers_of, watch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-10
"""Of the output's own square: what is no more than this is no rise."""

WIDTHS = tuple(place / 20 for place in range(1, 21))

_MOST = 1 << 23  # numbers of residuals that are held at a time, of one image: 64 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class RankErrors:
    """Hold ‖y − ŷ(r)‖² of one layer for r = 0 … R, on the inputs that the full network gives it.

    Attributes:
        form: how its weight became a matrix.
        params: of its two factors at each rank, (M + N) · r.
        energy: ‖y‖² of every image, without the bias.
        output: the error of its output, for every image and rank.
        before_taps: that before the vertical taps are summed; the same as `output` where the form has none.
    """

    name: str
    form: str
    params: Ints
    energy: Floats  # (B)
    output: Floats  # (B, R + 1)
    before_taps: Floats  # (B, R + 1)

    @property
    def relative(self) -> Floats:
        """Return the mean over images of the output's error as a part of ‖y‖², at each rank."""
        return _relative(self.output, self.energy)

    @property
    def rises(self) -> int:
        """Return in how many images the error of the output rises somewhere with the rank."""
        return _rising(self.output, self.energy)

    @property
    def rises_before_taps(self) -> int:
        """Return the same before the taps are summed: none, as proposition 1 has it."""
        return _rising(self.before_taps, self.energy)


@dataclass(frozen=True, kw_only=True, eq=False)
class WidthErrors:
    """Hold ‖y − ŷ(w)‖² of one layer that keeps its first w channels, in and out; the others are 0.

    The network's inputs and outputs keep all of theirs, as in slimmable networks.
    """

    name: str
    widths: tuple[float, ...]
    params: Ints
    energy: Floats  # (B)
    output: Floats  # (B, widths)

    @property
    def relative(self) -> Floats:
        """Return the mean over images of the error as a part of ‖y‖², at each width."""
        return _relative(self.output, self.energy)

    def rises(self, smallest: float = 0.0) -> int:
        """Return in how many images the error rises somewhere with the width, from the smallest that counts."""
        places = [place for place, width in enumerate(self.widths) if width >= smallest - 1e-9]
        return _rising(self.output[:, places], self.energy)


def _relative(errors: Floats, energy: Floats) -> Floats:
    found: Floats = (errors / np.maximum(energy, np.finfo(np.float64).tiny)[:, None]).mean(axis=0)
    return found


def _rising(errors: Floats, energy: Floats) -> int:
    return int((np.diff(errors, axis=1) > ROUNDING * energy[:, None]).any(axis=1).sum())


def errors_by_rank(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    form: str = "spatial",
    images: int = 64,
    forward: Forward | None = None,
    filter_fn: FilterFn | None = None,
) -> dict[str, RankErrors]:
    """Measure for every layer how far its output moves at each rank (proposition 1).

    >>> model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> found = errors_by_rank(model, [torch.randn(8, 6)])
    >>> found["0"].output.shape, found["0"].rises
    ((8, 6), 0)
    """
    check_count("images", images)
    layers = layers_of(model, form, filter_fn)
    watched = {layer.name: _ByRank(layer) for layer in layers}
    shown: dict[nn.Module, See] = {module: watched[each.name].see for each in layers for module in each.modules}
    watch(model, shown, loader, forward, images)
    return {name: one.result() for name, one in watched.items()}


class _ByRank:
    """The errors of one layer so far."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        matrix = to_matrix(layer.weight.detach().double(), layer.form)
        self.bases: SVD = svd({layer.name: matrix})[layer.name]
        self.energy: list[Tensor] = []
        self.output: list[Tensor] = []
        self.before: list[Tensor] = []

    def see(self, module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        """One call: the coordinates of every position along every basis, and what they add up to."""
        first, second = self.layer.chain.stages
        for x_BMP, rows in _per_image(inputs.detach().double(), module, first):
            along_BKP = (self.bases.u * self.bases.s).mT @ x_BMP
            self.before.append(_errors_of_products(self.bases.v, along_BKP))
            if any(second):  # vertical taps
                assert isinstance(module, nn.Conv2d)
                self.output.append(torch.stack([self._behind_taps(one_KP, module, rows) for one_KP in along_BKP]))
            else:
                self.output.append(self.before[-1])
            self.energy.append(self.output[-1][:, 0])

    def _behind_taps(self, along_KP: Tensor, conv: nn.Conv2d, rows: int) -> Tensor:
        """Return the errors of one image where what the taps add to a pixel is summed."""
        bases, height = len(along_KP), conv.kernel_size[0]
        maps_KHW = along_KP.reshape(bases, rows, -1)
        out_rows = (rows - conv.dilation[0] * (height - 1) - 1) // conv.stride[0] + 1
        taps = [
            maps_KHW[:, t * conv.dilation[0] :][:, : (out_rows - 1) * conv.stride[0] + 1 : conv.stride[0]]
            for t in range(height)
        ]
        _, v_OKT11 = matrix_form(self.layer.form).stages_of(self.bases.u, self.bases.v.mT, self.layer.shape)
        return _errors(v_OKT11.squeeze(-1), torch.stack(taps, dim=1))

    def result(self) -> RankErrors:
        if not self.energy:
            raise InvalidArgumentError(
                f"layer '{self.layer.name}': no image reaches it; allowed: filter_fn= without it"
            )
        energy, output, before = (torch.cat(each).cpu().numpy() for each in (self.energy, self.output, self.before))
        ranks = np.arange(len(self.bases.s) + 1, dtype=np.int64)
        return RankErrors(
            name=self.layer.name,
            form=self.layer.form,
            params=sum(matrix_shape(self.layer.shape, self.layer.form)) * ranks,
            energy=energy,
            output=output,
            before_taps=before,
        )


def _errors_of_products(v_NK: Tensor, along_BKP: Tensor) -> Tensor:
    """‖Σ_{i>r} v_i (σ_i u_iᵀ x)‖² of every image for r = 0 … K, added up as it stands: Σ_{i,j>r} (v_iᵀ v_j)(a_i · a_j),
    with a_i what all positions have along basis i. That the v_i are orthonormal is not made use of: it is what
    proposition 1 rests on.
    """
    products_BKK = (v_NK.mT @ v_NK) * (along_BKP @ along_BKP.mT)
    sums_BKK = products_BKK.flip(1, 2).cumsum(dim=1).cumsum(dim=2)
    sums_BK = sums_BKK.diagonal(dim1=1, dim2=2).flip(1)
    return torch.cat([sums_BK, sums_BK.new_zeros(len(sums_BK), 1)], dim=1)


def _errors(v_OKT: Tensor, taps_KTHW: Tensor) -> Tensor:
    """The same of one image where a pixel sums what the taps of several rows add to it: what is left of the output,
    from the last basis to the first.
    """
    bases = len(taps_KTHW)
    left = taps_KTHW.new_zeros(len(v_OKT), *taps_KTHW.shape[2:])
    errors = left.new_zeros(bases + 1)
    block = max(1, _MOST // max(1, left.numel()))
    for stop in range(bases, 0, -block):
        part = slice(max(0, stop - block), stop)
        added_KOHW = torch.einsum("okt,kthw->kohw", v_OKT[:, part], taps_KTHW[part])
        residuals_KOHW = added_KOHW.flip(0).cumsum(dim=0).flip(0) + left
        errors[part] = residuals_KOHW.square().sum(dim=(1, 2, 3))
        left = residuals_KOHW[0]
    return errors


def _per_image(inputs: Tensor, module: nn.Module, axes: Axes) -> Iterator[tuple[Tensor, int]]:
    """Return the columns that a layer's matrix is applied to, and their number of padded rows; a few images at once."""
    if isinstance(module, nn.Linear):
        yield inputs.reshape(len(inputs), -1, inputs.shape[-1]).mT if inputs.dim() > 1 else inputs[None, :, None], 0
        return
    assert isinstance(module, Convolution)
    maps = inputs if inputs.dim() == len(axes) + 2 else inputs[None]
    for part in maps.split(8):
        yield input_patches(part, module, axes), padded_extents(part, module)[0]


def errors_by_width(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    widths: Sequence[float] = WIDTHS,
    images: int = 64,
    forward: Forward | None = None,
    filter_fn: FilterFn | None = None,
) -> dict[str, WidthErrors]:
    """Measure how far every layer's output moves if it keeps the first channels only, as slimmable networks do."""
    check_count("images", images)
    if not widths or not all(is_number(w) and 0 < w <= 1 for w in widths):
        raise InvalidArgumentError(f"widths={widths!r:.80}; allowed: parts of the channels, as in (0.25, 0.5, 1)")
    layers = layers_of(model, "channel", filter_fn)
    order: list[str] = []
    for layer in layers:
        if len(layer.modules) > 1:
            raise InvalidArgumentError(f"layer '{layer.name}': its weight is shared; allowed: filter_fn= without it")
    batches = renewable(loader, forward or call_with_first, "errors_by_width")
    watch(model, {layer.modules[0]: _noting(order, layer.name) for layer in layers}, batches, forward, 1)
    ends = (order[0], order[-1]) if order else ("", "")
    watched = {layer.name: _ByWidth(layer, tuple(widths), ends) for layer in layers if layer.name in order}
    shown: dict[nn.Module, See] = {each.modules[0]: watched[each.name].see for each in layers if each.name in watched}
    watch(model, shown, batches, forward, images)
    return {name: one.result() for name, one in watched.items()}


def _noting(order: list[str], name: str) -> Any:
    return lambda module, inputs, outputs: None if name in order else order.append(name)


class _ByWidth:
    """The errors of one layer so far."""

    def __init__(self, layer: Layer, widths: tuple[float, ...], ends: tuple[str, str]) -> None:
        self.layer, self.widths = layer, widths
        outs, ins = layer.shape[:2]
        self.kept = [
            (
                outs if layer.name == ends[1] else max(1, int(w * outs + 1e-9)),
                ins if layer.name == ends[0] else max(1, int(w * ins + 1e-9)),
            )
            for w in widths
        ]
        self.energy: list[Tensor] = []
        self.output: list[Tensor] = []

    def see(self, module: nn.Module, inputs: Tensor, outputs: Tensor) -> None:
        """One call, with every width."""
        x, weight = inputs.detach().double(), self.layer.weight.detach().double()
        axis = -1 if isinstance(module, nn.Linear) else 1
        whole = _applied(module, x, weight)
        squares = whole.square()
        self.energy.append(squares.flatten(1).sum(dim=1))
        errors = []
        for outs, ins in self.kept:
            given = _applied(module, x.narrow(axis, 0, ins), weight[:outs, :ins])
            lost = squares.narrow(axis, outs, whole.shape[axis] - outs).flatten(1).sum(dim=1)
            errors.append((whole.narrow(axis, 0, outs) - given).square().flatten(1).sum(dim=1) + lost)
        self.output.append(torch.stack(errors, dim=1))

    def result(self) -> WidthErrors:
        kernel = int(np.prod(self.layer.shape[2:], dtype=np.int64))
        return WidthErrors(
            name=self.layer.name,
            widths=self.widths,
            params=np.array([outs * ins * kernel for outs, ins in self.kept], dtype=np.int64),
            energy=torch.cat(self.energy).cpu().numpy(),
            output=torch.cat(self.output).cpu().numpy(),
        )


def _applied(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Return the layer without its bias, with another weight."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight)
    assert isinstance(module, Convolution)
    return module._conv_forward(x, weight, None)
