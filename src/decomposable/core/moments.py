"""Second moments of what goes into a layer's matrix and of the gradient of what comes out of it.

With y = Wᵀx at every position of a feature map, cutting W to W̃ changes y by (W − W̃)ᵀx. How much that matters, data
tell: A, the mean of x xᵀ, says how strongly each direction of the input is used, and G, the mean over images of
Σ g gᵀ with g = ∂L/∂y, how strongly the loss feels each direction of the output.

What x and g are depends on the form. In the channel form x is a patch of the input and y a pixel of the output. In
the spatial form the matrix stands between the horizontal patches of every padded input row and what they add to the
output pixels above, at and below it: x has (I·W) entries, and g is a vertical patch of the output's gradient, (O·H)
entries, with zeros where a stride leaves a row out or the map ends. In both Σ x gᵀ over positions is ∂L/∂W.

Shape suffixes: B images; P positions; O, I, H, W, M, N as in `forms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.forms import Form, matrix_shape
from decomposable.core.layers import Layer
from decomposable.core.tracing import Forward, first_entry
from decomposable.core.tree import evaluating
from decomposable.errors import InvalidArgumentError

MOST_MOMENTS = 1 << 30
"""Bytes of second moments that are held at a time: 1 GiB. What does not fit is measured in a pass of its own."""

_MOST_PATCHES = 1 << 26  # bytes of patches that are laid out at a time: 64 MiB

Loss = Callable[[Any, int], Tensor]
"""``loss(outputs, number)`` of a batch by its number in the pass: the *sum* over its images."""


@dataclass(frozen=True, eq=False)
class Moments:
    """A (M × M), and G (N × N) where a loss was given, of one layer's matrix; float32."""

    inputs: Tensor
    gradients: Tensor | None = None


def second_moments(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Any],
    forward: Forward,
    loss: Loss | None = None,
    *,
    memory: int = MOST_MOMENTS,
    seen: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Moments]]:
    """A, and with a loss G, of every layer, from as few passes over the batches as the memory allows: those of a pass
    come together, and are gone when the next ones are asked for.

    The model runs in eval mode and is as before afterwards. The loss is a sum, so that what reaches a layer for one
    image is that image's own gradient. `seen` is called after every batch. A layer that no batch reaches has moments
    of zero.
    """
    for group in passes(layers, with_gradients=loss is not None, memory=memory):
        sums = {layer.name: _Sums(layer, with_gradients=loss is not None) for layer in group}
        images = 0
        with evaluating(model), _frozen(model), _watched(sums.values()):
            for number, batch in enumerate(batches):
                images += _images(batch)
                with torch.set_grad_enabled(loss is not None):
                    outputs = forward(model, batch)
                    if loss is not None:
                        _lead_back(loss(outputs, number), sums.values())
                seen()
        if not images:
            raise InvalidArgumentError("data: it yielded no batch; allowed: a loader that can be gone through again")
        found = {name: each.means(images) for name, each in sums.items()}
        for name, one in found.items():
            if not _is_finite(one):
                raise InvalidArgumentError(
                    f"layer '{name}': data gave NaN or infinity; allowed: finite inputs and outputs"
                )
        del sums, one
        yield found
        del found  # before the next pass needs the memory


def _is_finite(moments: Moments) -> bool:
    sides = (moments.inputs, moments.gradients)
    return all(bool(side.isfinite().all()) for side in sides if side is not None)


def _lead_back(loss: Tensor, all_sums: Iterable[_Sums]) -> None:
    """Lead the loss back; refuse a network, or a layer, that runs where no gradient can be had."""
    blind = next((sums.layer.name for sums in all_sums if sums.is_blind), None)
    if blind is not None or not loss.requires_grad:
        what = f"layer '{blind}' runs" if blind is not None else "the outputs were computed"
        raise InvalidArgumentError(
            f"criterion='loss': {what} without gradients (torch.no_grad in the model or in forward=, a detach); "
            "allowed: criterion='output'"
        )
    loss.backward()


def passes(layers: Sequence[Layer], *, with_gradients: bool, memory: int = MOST_MOMENTS) -> list[list[Layer]]:
    """The layers in groups whose moments fit in the memory; one that fits in none has a group of its own."""
    groups: list[list[Layer]] = []
    left = 0
    for layer in layers:
        rows, columns = matrix_shape(layer.shape, layer.form)
        size = 4 * (rows**2 + (columns**2 if with_gradients else 0))
        if not groups or size > left:
            groups.append([])
            left = memory
        groups[-1].append(layer)
        left -= size
    return groups


def _images(batch: Any) -> int:
    inputs = first_entry(batch)
    return len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 1 else 1


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter wants a gradient: graphs begin at the outputs of the layers that are watched."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _watched(all_sums: Iterable[_Sums]) -> Iterator[None]:
    """Inside, every call of the layers adds to their sums."""
    with ExitStack() as hooks:
        for sums in all_sums:
            for module in sums.layer.modules:
                hooks.callback(module.register_forward_hook(sums.see, with_kwargs=True).remove)
        yield


class _Sums:
    """Σ x xᵀ and Σ g gᵀ of one layer, over all its calls."""

    def __init__(self, layer: Layer, *, with_gradients: bool) -> None:
        self.layer = layer
        rows, columns = matrix_shape(layer.shape, layer.form)
        device = layer.weight.device
        self.inputs, self.positions = torch.zeros(rows, rows, device=device), 0
        self.gradients = torch.zeros(columns, columns, device=device) if with_gradients else None
        self.is_blind = False  # whether it ran where no gradient can be had

    def means(self, images: int) -> Moments:
        gradients = None if self.gradients is None else self.gradients.div_(images)
        return Moments(self.inputs.div_(max(1, self.positions)), gradients)

    def see(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """A forward hook."""
        inputs = args[0] if args else kwargs["input"]
        for x_BMP in _patches(input_patches, inputs.detach(), module, self.layer.form):
            self.inputs.addbmm_(x_BMP, x_BMP.mT)
            self.positions += x_BMP.shape[0] * x_BMP.shape[2]
        if self.gradients is not None and not torch.is_grad_enabled():
            self.is_blind = True
        elif self.gradients is not None:
            if not output.requires_grad:  # a copy, because what comes next may change it in place
                output = output.detach().requires_grad_(True).clone()
            rows = padded_rows(inputs, module) if isinstance(module, nn.Conv2d) else 0
            output.register_hook(lambda gradient: self._see_gradient(module, gradient.detach(), rows))
        return output

    def _see_gradient(self, module: nn.Module, gradient: Tensor, rows: int) -> None:
        assert self.gradients is not None
        for g_BNP in _patches(partial(_gradient_patches, rows=rows), gradient, module, self.layer.form):
            self.gradients.addbmm_(g_BNP, g_BNP.mT)


def _patches(cut: Callable[..., Tensor], maps: Tensor, module: nn.Module, form: Form) -> Iterator[Tensor]:
    """What a matrix sees of some maps, or of their gradients, as columns of each image; a few images at a time."""
    if isinstance(module, nn.Linear):
        yield maps.reshape(1, -1, maps.shape[-1]).mT.float()
        return
    assert isinstance(module, nn.Conv2d)
    maps = maps if maps.dim() == 4 else maps[None]
    per_image = 4 * maps[0].numel() * math.prod(module.kernel_size) * math.prod(module.stride)
    for part in maps.split(max(1, _MOST_PATCHES // max(1, per_image))):
        yield cut(part.float(), module, form)


def _padded(maps_BIHW: Tensor, conv: nn.Conv2d) -> Tensor:
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(maps_BIHW, conv._reversed_padding_repeated_twice, mode=mode)


def padded_rows(maps_BIHW: Tensor, conv: nn.Conv2d) -> int:
    """How many rows a map has once it is padded."""
    _, _, above, below = conv._reversed_padding_repeated_twice
    return maps_BIHW.shape[-2] + above + below


def input_patches(maps_BIHW: Tensor, conv: nn.Conv2d, form: Form) -> Tensor:
    """(B × M × P): patches of H × W pixels, or in the spatial form of 1 × W at every padded row."""
    (_, width), (_, stride), (_, dilation) = conv.kernel_size, conv.stride, conv.dilation
    padded = _padded(maps_BIHW, conv)
    if form == "spatial":
        return F.unfold(padded, (1, width), dilation=(1, dilation), stride=(1, stride))
    return F.unfold(padded, conv.kernel_size, dilation=conv.dilation, stride=conv.stride)


def _gradient_patches(maps_BOHW: Tensor, conv: nn.Conv2d, form: Form, rows: int) -> Tensor:
    """(B × N × P): pixels, or in the spatial form for every one of `rows` padded input rows those that it adds to."""
    if form != "spatial":
        return maps_BOHW.flatten(2)
    height, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
    reach = (height - 1) * dilation
    batch, channels, out_rows, columns = maps_BOHW.shape
    spread = maps_BOHW.new_zeros(batch, channels, rows + reach, columns)
    spread[:, :, reach : reach + out_rows * stride : stride] = maps_BOHW
    taps = [spread[:, :, reach - tap * dilation :][:, :, :rows] for tap in range(height)]
    return torch.stack(taps, dim=2).reshape(batch, channels * height, -1)
