"""Second moments of what goes into a layer's matrix and of the gradient of what comes out of it.

With y = Wᵀx at every position of a feature map, cutting W to W̃ changes y by (W − W̃)ᵀx. How much that matters, data
tell: A, the mean of x xᵀ, says how strongly each direction of the input is used, and G, the mean over images of
Σ g gᵀ with g = ∂L/∂y, how strongly the loss feels each direction of the output.

Here x is a patch of the padded input along the axes of the kernel that the first stage has, and g one of the output's
gradient along those of the second, with zeros where a stride leaves a position out or the map ends:

    channel      a patch of the input, and a pixel of the output
    spatial      a horizontal patch of an input row, and the output pixels above, at and below it that it adds to
    pointwise    a pixel of the input, and the output pixels that the transposed kernel adds to

In all of them Σ x gᵀ over positions is ∂L/∂W. Only layers with one cut have such a matrix. How moments are summed up,
and how far they can be believed, is in `sums.py`.

Shape suffixes: B images; P positions; O, I, M, N as in `forms`; X the axes of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.forms import matrix_shape
from decomposable.core.gradients import requiring_grad
from decomposable.core.layers import Convolution, Layer, Transposed
from decomposable.core.sums import Moments, Sum, bytes_of, grouped
from decomposable.core.tracing import Forward, first_entry
from decomposable.core.tree import evaluating
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Axes

MOST_MOMENTS = 1 << 30
"""Bytes of second moments that are held at a time: 1 GiB. What does not fit is measured in a pass of its own."""

MOST_POSITIONS = 196
"""Positions of an image that a moment is taken from, those of a map of 14 × 14; of a larger map, so many by chance.
Neighbours are alike, and hundreds of images bring more positions than a layer is wide."""

_MOST_PATCHES = 1 << 26  # bytes of patches that are laid out at a time: 64 MiB

Loss = Callable[[Any, int], Tensor]
"""``loss(outputs, number)`` of a batch by its number in the pass: the *sum* over its images."""


class NoGradientError(InvalidArgumentError):
    """Say that a network, or a layer of it, runs where no gradient can be had."""


def second_moments(
    model: nn.Module,
    layers: Sequence[Layer],
    batches: Iterable[Any],
    forward: Forward,
    loss: Loss | None = None,
    *,
    centred: Collection[str] = (),
    memory: int = MOST_MOMENTS,
    first: int = 0,
    seen: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Moments]]:
    """Yield A, and with a loss G, of every layer, from as few passes over the batches as the memory allows.

    Those of a pass come together, and are gone when the next ones are asked for.

    The model runs in eval mode and is as before afterwards. The loss is a sum, so that each image has its own gradient.
    Of the `centred` layers A is the covariance inside the batches: batch normalisation behind them takes the mean away.
    `first` is the number of the first batch, by which the loss draws: two parts of the data that judge each other must
    not have the same draws. `seen` is called after every batch. A layer that no batch reaches has moments of zero.
    """
    for group in passes(layers, with_gradients=loss is not None, memory=memory):
        watched = [_Watched(layer, loss is not None, layer.name in centred) for layer in group]
        images = 0
        with evaluating(model), requiring_grad(model.parameters(), False), ExitStack() as hooks:
            for each in watched:
                for module in each.layer.modules:
                    hooks.callback(module.register_forward_hook(each.see, with_kwargs=True).remove)
            for number, batch in enumerate(batches, first):
                count = samples_in(batch)
                images += count
                with torch.set_grad_enabled(loss is not None):
                    outputs = forward(model, batch)
                    if loss is not None:
                        _lead_back(loss(outputs, number), watched)
                del outputs
                for each in watched:
                    each.end_batch(count)
                seen()
        if not images:
            raise InvalidArgumentError.about(
                "data", 0, "a loader that begins anew each time", why="it yielded no batch"
            )
        found = {each.layer.name: Moments.of(*(side.mean() for side in each.sums)) for each in watched}
        for name, moments in found.items():
            if not all(bool(side.isfinite().all()) for side in moments.sides):
                why, allowed = "it gave NaN or infinity", "finite inputs and outputs"
                raise InvalidArgumentError.about("data", None, allowed, why=why, layer=name)
        del watched, each, moments
        yield found
        del found  # before the next pass needs the memory


def _lead_back(loss: Tensor, watched: Iterable[_Watched]) -> None:
    """Lead the loss back; refuse a network, or a layer, that runs where no gradient can be had."""
    blind = next((each.layer.name for each in watched if each.is_blind), None)
    if blind is not None or not loss.requires_grad:
        what = "the outputs were computed" if blind is None else "it runs"
        why = f"'loss', but {what} without gradients (torch.no_grad in the model or in forward=, a detach)"
        raise NoGradientError.about("criterion", "loss", "criterion='output'", why=why, layer=blind)
    loss.backward()


def passes(layers: Sequence[Layer], *, with_gradients: bool, memory: int = MOST_MOMENTS) -> list[list[Layer]]:
    """Return the layers in groups whose moments fit in the memory; one that fits in none has a group of its own."""
    by_name = {layer.name: layer for layer in layers}
    groups = grouped({layer.name: _bytes(layer, with_gradients) for layer in layers}, memory)
    return [[by_name[name] for name in group] for group in groups]


def moments_bytes(layers: Sequence[Layer], *, with_gradients: bool, memory: int = MOST_MOMENTS) -> int:
    """Return the bytes of the moments that are held at a time."""
    groups = passes(layers, with_gradients=with_gradients, memory=memory)
    return max((sum(_bytes(layer, with_gradients) for layer in group) for group in groups), default=0)


def _bytes(layer: Layer, with_gradients: bool) -> int:
    return bytes_of(matrix_shape(layer.shape, layer.form)[: 1 + with_gradients])


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by its first entry."""
    inputs = first_entry(batch)
    return len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 1 else 1


class _Watched:
    """Sum x xᵀ and, where there is a loss, g gᵀ of one layer, over all its calls."""

    def __init__(self, layer: Layer, with_gradients: bool, is_centred: bool) -> None:
        (rows, columns), device = matrix_shape(layer.shape, layer.form), layer.weight.device
        gradients = [Sum(columns, device)] if with_gradients else []
        self.layer, self.sums = layer, [Sum(rows, device, is_centred=is_centred), *gradients]
        self.is_blind = False  # whether it ran where no gradient can be had
        self._generator = torch.Generator().manual_seed(0)

    def end_batch(self, images: int) -> None:
        """End a batch: A is a mean over positions, G one over images."""
        for side, weight in zip(self.sums, (None, images), strict=False):
            side.end_batch(weight)

    def see(self, module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Add a call of the layer, as a forward hook."""
        inputs = args[0] if args else kwargs["input"]
        if not inputs.numel():  # as of an expert that no token of the batch goes to
            return output
        first, second = self.layer.chain.stages
        of_inputs, *of_gradients = self.sums
        self._add(of_inputs, _columns(inputs.detach(), module, lambda x: input_patches(x, module, first)))
        if not torch.is_grad_enabled():
            self.is_blind = True
        elif of_gradients:
            if not output.requires_grad:  # a copy, because what comes next may change it in place
                output = output.detach().requires_grad_(True).clone()
            extents = padded_extents(inputs, module) if second else ()

            def add_gradient(gradient: Tensor) -> None:
                columns = _columns(gradient.detach(), module, lambda g: _gradient_patches(g, module, second, extents))
                self._add(of_gradients[0], columns)

            output.register_hook(add_gradient)
        return output

    def _add(self, side: Sum, columns: Iterable[Tensor]) -> None:
        """Add columns; where an image has many positions, some stand for all."""
        for x_BMP in columns:
            positions = x_BMP.shape[2]
            if positions > MOST_POSITIONS:
                chosen = torch.randperm(positions, generator=self._generator)[:MOST_POSITIONS]
                x_BMP = x_BMP[:, :, chosen.to(x_BMP.device)]
            side.add(x_BMP, positions)


def _columns(maps: Tensor, module: nn.Module, patches: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield what a matrix sees of some maps, or of their gradients, as columns; a few images at a time."""
    if isinstance(module, Convolution | Transposed):
        maps = maps if maps.dim() == len(module.kernel_size) + 2 else maps[None]
        per_image = 4 * maps[0].numel() * math.prod(module.kernel_size) * math.prod(module.stride)
        for part in maps.split(max(1, _MOST_PATCHES // per_image)):
            yield patches(part.float())
    elif maps.dim() > 2 and math.prod(maps.shape[1:-1]) > MOST_POSITIONS:  # rows of a `Linear`: of each long sample,
        yield maps.flatten(1, -2).mT.float()
    else:  # or of all together
        for rows in maps.reshape(-1, maps.shape[-1]).split(MOST_POSITIONS):
            yield rows.mT[None].float()


def padded_extents(maps_BIX: Tensor, conv: Convolution | Transposed) -> tuple[int, ...]:
    """Return the sizes of a map along the axes of the kernel, once it is padded as the convolution does it."""
    sizes = maps_BIX.shape[-len(conv.kernel_size) :]
    if isinstance(conv, Transposed):
        return tuple(sizes)
    added = conv._reversed_padding_repeated_twice[::-1]
    return tuple(size + added[2 * i] + added[2 * i + 1] for i, size in enumerate(sizes))


def input_patches(maps_BIX: Tensor, conv: Convolution | Transposed, axes: Axes) -> Tensor:
    """Return (B × M × P): patches along these axes of the kernel, at every padded position along the others."""
    if not isinstance(conv, Transposed):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        maps_BIX = F.pad(maps_BIX, conv._reversed_padding_repeated_twice, mode=mode)
    for i, own in enumerate(axes):
        maps_BIX = _with_taps(maps_BIX, conv, i, conv.stride[i]) if own else maps_BIX
    return _as_columns(maps_BIX, len(axes))


def _gradient_patches(maps_BOX: Tensor, conv: Convolution | Transposed, axes: Axes, extents: Sequence[int]) -> Tensor:
    """Return (B × N × P): for every padded input position along these axes, the output pixels that it adds to, and
    along the others every output position.
    """
    for i, own in enumerate(axes):
        if not own:
            continue
        reach, stride, size = (conv.kernel_size[i] - 1) * conv.dilation[i], conv.stride[i], maps_BOX.shape[2 + i]
        if isinstance(conv, Transposed):  # whose kernel lies from each position on, where padding does not cut it off
            before = int(conv.padding[i])
            after = (extents[i] - 1) * stride + reach + 1 - before - size
            padded = F.pad(maps_BOX.movedim(2 + i, -1), (before, after)).movedim(-1, 2 + i)
            maps_BOX = _with_taps(padded, conv, i, stride)
        else:
            shape = [*maps_BOX.shape[: 2 + i], extents[i] + reach, *maps_BOX.shape[3 + i :]]
            spread = maps_BOX.new_zeros(shape)
            spread.narrow(2 + i, reach, (size - 1) * stride + 1).movedim(2 + i, 0)[::stride] = maps_BOX.movedim(
                2 + i, 0
            )
            maps_BOX = torch.stack(_with_taps(spread, conv, i, 1).unbind(-1)[::-1], dim=-1)
    return _as_columns(maps_BOX, len(axes))


def _with_taps(maps: Tensor, conv: Convolution | Transposed, axis: int, step: int) -> Tensor:
    """Return what the taps of the kernel see along one of its axes, from every so many positions; taps come last."""
    reach = (conv.kernel_size[axis] - 1) * conv.dilation[axis]
    return maps.unfold(2 + axis, reach + 1, step)[..., :: conv.dilation[axis]]


def _as_columns(maps: Tensor, axes: int) -> Tensor:
    """Return channels with the taps behind the axes of the map, as columns of each position."""
    return maps.flatten(2, 1 + axes).movedim(2, -1).flatten(1, -2)
