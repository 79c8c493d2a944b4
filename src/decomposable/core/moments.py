"""Second moments of what goes into a layer's matrix and of the gradient of what comes out of it.

With y = Wᵀx at every position of a feature map, cutting W to W̃ changes y by (W − W̃)ᵀx. How much that matters, data
tell: A, the mean of x xᵀ, says how strongly each direction of the input is used, and G, the mean over images of
Σ g gᵀ with g = ∂L/∂y, how strongly the loss feels each direction of the output.

What x and g are depends on which axes of the kernel each of the two stages has: x is a patch of the padded input along
the axes of the first, and g one of the output's gradient along those of the second, with zeros where a stride leaves a
position out or the map ends. In the channel form that is a patch of the input and a pixel of the output. In the spatial
form the matrix stands between the horizontal patches of every padded input row and what they add to the output pixels
above, at and below it. In both Σ x gᵀ over positions is ∂L/∂W.

A transposed convolution multiplies every pixel of its input with the whole kernel, and adds that to the output at the
kernel's taps. So in the pointwise form x is one pixel, and g the gradient at these taps.

Only layers with one cut have such a matrix. How moments are summed up, and how far they can be believed, is in
`sums.py`.

Shape suffixes: B images; P positions; O, I, M, N as in `forms`; X the axes of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposable.core.forms import matrix_shape
from decomposable.core.layers import Convolution, Layer, Transposed
from decomposable.core.sums import Moments, Sum, blocks_of
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

    The model runs in eval mode and is as before afterwards. The loss is a sum, so that what reaches a layer for one
    image is that image's own gradient. Of the `centred` layers A is the covariance inside the batches: batch
    normalisation behind them takes the mean away. `first` is the number of the first batch, by which the loss draws:
    two parts of the data that judge each other must not have the same draws. `seen` is called after every batch. A
    layer that no batch reaches has moments of zero.
    """
    for group in passes(layers, with_gradients=loss is not None, memory=memory):
        sums = {
            layer.name: _Sums(layer, with_gradients=loss is not None, is_centred=layer.name in centred)
            for layer in group
        }
        images = 0
        with evaluating(model), _frozen(model), _watched(sums.values()):
            for number, batch in enumerate(batches, first):
                count = samples_in(batch)
                images += count
                with torch.set_grad_enabled(loss is not None):
                    outputs = forward(model, batch)
                    if loss is not None:
                        _lead_back(loss(outputs, number), sums.values())
                del outputs
                for each in sums.values():
                    each.end_batch(count)
                seen()
        if not images:
            raise InvalidArgumentError("data: it yielded no batch; allowed: a loader that can be gone through again")
        found = {name: each.means() for name, each in sums.items()}
        for name, one in found.items():
            sides = (one.inputs,) if one.gradients is None else (one.inputs, one.gradients)
            if not all(bool(side.isfinite().all()) for side in sides):
                raise InvalidArgumentError(
                    f"layer '{name}': data gave NaN or infinity; allowed: finite inputs and outputs"
                )
        del sums, one, sides
        yield found
        del found  # before the next pass needs the memory


def _lead_back(loss: Tensor, all_sums: Iterable[_Sums]) -> None:
    """Lead the loss back; refuse a network, or a layer, that runs where no gradient can be had."""
    blind = next((sums.layer.name for sums in all_sums if sums.is_blind), None)
    if blind is not None or not loss.requires_grad:
        what = f"layer '{blind}' runs" if blind is not None else "the outputs were computed"
        raise NoGradientError(
            f"criterion='loss': {what} without gradients (torch.no_grad in the model or in forward=, a detach); "
            "allowed: criterion='output'"
        )
    loss.backward()


def passes(layers: Sequence[Layer], *, with_gradients: bool, memory: int = MOST_MOMENTS) -> list[list[Layer]]:
    """Return the layers in groups whose moments fit in the memory; one that fits in none has a group of its own."""
    groups: list[list[Layer]] = []
    left = 0
    for layer in layers:
        size = _size(layer, with_gradients)
        if not groups or size > left:
            groups.append([])
            left = memory
        groups[-1].append(layer)
        left -= size
    return groups


def moments_bytes(layers: Sequence[Layer], *, with_gradients: bool, memory: int = MOST_MOMENTS) -> int:
    """Return the bytes of the moments that are held at a time."""
    groups = passes(layers, with_gradients=with_gradients, memory=memory)
    return max((sum(_size(layer, with_gradients) for layer in group) for group in groups), default=0)


def _size(layer: Layer, with_gradients: bool) -> int:
    rows, columns = matrix_shape(layer.shape, layer.form)
    return _bytes_of(rows) + (_bytes_of(columns) if with_gradients else 0)


def _bytes_of(width: int) -> int:
    """Return what the moment of a side takes while it is measured: the sum, and that of the current batch."""
    count, block = blocks_of(width)
    return 2 * 4 * count * block**2


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has, by its first entry."""
    inputs = first_entry(batch)
    return len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 1 else 1


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Take no gradient of parameters inside: graphs begin at the outputs of the layers that are watched."""
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
    """Add every call of the layers inside to their sums."""
    with ExitStack() as hooks:
        for sums in all_sums:
            for module in sums.layer.modules:
                hooks.callback(module.register_forward_hook(sums.see, with_kwargs=True).remove)
        yield


class _Sums:
    """Sum x xᵀ and g gᵀ of one layer, over all its calls."""

    def __init__(self, layer: Layer, *, with_gradients: bool, is_centred: bool) -> None:
        self.layer = layer
        rows, columns = matrix_shape(layer.shape, layer.form)
        device = layer.weight.device
        self.inputs = Sum(rows, device, is_centred=is_centred)
        self.gradients = Sum(columns, device) if with_gradients else None
        self.is_blind = False  # whether it ran where no gradient can be had
        self._generator = torch.Generator().manual_seed(0)

    def end_batch(self, images: int) -> None:
        """End a batch: A is a mean over positions, G one over images."""
        self.inputs.end_batch()
        if self.gradients is not None:
            self.gradients.end_batch(images)

    def means(self) -> Moments:
        """Return both moments, with their errors."""
        inputs, inputs_spread = self.inputs.mean()
        if self.gradients is None:
            return Moments.of(inputs, inputs_spread)
        return Moments.of(inputs, inputs_spread, *self.gradients.mean())

    def see(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Add a call of the layer, as a forward hook."""
        inputs = args[0] if args else kwargs["input"]
        if not inputs.numel():  # as of an expert that no token of the batch goes to
            return output
        first, second = self.layer.chain.stages
        is_spread = isinstance(module, Transposed)
        patches = partial(input_patches, axes=first)
        for x_BMP, positions in self._some(_patches(patches, inputs.detach(), module)):
            self.inputs.add(x_BMP, positions)
        if self.gradients is not None and not torch.is_grad_enabled():
            self.is_blind = True
        elif self.gradients is not None:
            if not output.requires_grad:  # a copy, because what comes next may change it in place
                output = output.detach().requires_grad_(True).clone()
            extents = padded_extents(inputs, module) if isinstance(module, Convolution) else ()
            cut = partial(_gradient_patches, axes=second, extents=extents)
            if is_spread:
                cut = partial(_gradient_taps, extents=inputs.shape[-len(second) :])
            output.register_hook(lambda gradient: self._see_gradient(module, gradient.detach(), cut))
        return output

    def _see_gradient(self, module: nn.Module, gradient: Tensor, cut: Callable[..., Tensor]) -> None:
        assert self.gradients is not None
        for g_BNP, positions in self._some(_patches(cut, gradient, module)):
            self.gradients.add(g_BNP, positions)

    def _some(self, patches: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """Yield columns, some that stand for all where an image has many positions, and how many there are."""
        for x_BMP in patches:
            positions = x_BMP.shape[2]
            if positions <= MOST_POSITIONS:
                yield x_BMP, positions
            else:
                chosen = torch.randperm(positions, generator=self._generator)[:MOST_POSITIONS]
                yield x_BMP[:, :, chosen.to(x_BMP.device)], positions


def _patches(cut: Callable[..., Tensor], maps: Tensor, module: nn.Module) -> Iterator[Tensor]:
    """Yield what a matrix sees of some maps, or of their gradients, as columns; a few images at a time."""
    if isinstance(module, nn.Linear):
        yield from _linear_columns(maps)
        return
    assert isinstance(module, Convolution | Transposed)
    maps = maps if maps.dim() == len(module.kernel_size) + 2 else maps[None]
    per_image = 4 * maps[0].numel() * math.prod(module.kernel_size) * math.prod(module.stride)
    for part in maps.split(max(1, _MOST_PATCHES // max(1, per_image))):
        yield cut(part.float(), module)


def _linear_columns(maps: Tensor) -> Iterator[Tensor]:
    """Yield the rows that a `Linear` sees, as columns: of each sample where these are long, else of all together."""
    if maps.dim() > 2 and math.prod(maps.shape[1:-1]) > MOST_POSITIONS:
        yield maps.flatten(1, -2).mT.float()
        return
    for rows in maps.reshape(-1, maps.shape[-1]).split(MOST_POSITIONS):
        yield rows.mT[None].float()


def padded_extents(maps_BIX: Tensor, conv: Convolution) -> tuple[int, ...]:
    """Return the sizes of a map along the axes of the kernel, once it is padded."""
    added = conv._reversed_padding_repeated_twice[::-1]
    sizes = maps_BIX.shape[-len(conv.kernel_size) :]
    return tuple(size + added[2 * i] + added[2 * i + 1] for i, size in enumerate(sizes))


def input_patches(maps_BIX: Tensor, conv: Convolution | Transposed, axes: Axes) -> Tensor:
    """Return (B × M × P): patches along these axes of the kernel, at every padded position along the others."""
    if isinstance(conv, Transposed):
        return maps_BIX.flatten(2)
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    found = F.pad(maps_BIX, conv._reversed_padding_repeated_twice, mode=mode)
    for i, own in enumerate(axes):
        if own:
            size, step, apart = conv.kernel_size[i], conv.stride[i], conv.dilation[i]
            found = found.unfold(2 + i, (size - 1) * apart + 1, step)[..., ::apart]
    return _as_columns(found, len(axes))


def _as_columns(maps: Tensor, axes: int) -> Tensor:
    """Return channels with the taps behind the axes of the map, as columns of each position."""
    batch, positions = len(maps), math.prod(maps.shape[2 : 2 + axes])
    return maps.flatten(2, 1 + axes).movedim(2, -1).reshape(batch, -1, positions)


def _gradient_patches(maps_BOX: Tensor, conv: Convolution, axes: Axes, extents: Sequence[int]) -> Tensor:
    """Return (B × N × P): for every padded input position along these axes, the output pixels that it adds to, and
    along the others every output position.
    """
    found = maps_BOX
    for i, own in enumerate(axes):
        if own:
            found = _spread(found, 2 + i, conv.kernel_size[i], conv.stride[i], conv.dilation[i], extents[i])
    return _as_columns(found, len(axes))


def _spread(maps: Tensor, axis: int, size: int, stride: int, dilation: int, extent: int) -> Tensor:
    """Return what lies along an axis of the output, for each padded position of the input; taps are the last axis."""
    reach = (size - 1) * dilation
    shape = list(maps.shape)
    shape[axis] = extent + reach
    spread = maps.new_zeros(shape)
    last = reach + (maps.shape[axis] - 1) * stride + 1
    spread[(slice(None),) * axis + (slice(reach, last, stride),)] = maps
    return torch.stack([spread.narrow(axis, reach - tap * dilation, extent) for tap in range(size)], dim=-1)


def _gradient_taps(maps_BOX: Tensor, conv: Transposed, extents: Sequence[int]) -> Tensor:
    """Return (B × O·kernel × P): for every position of the input, the gradient at the pixels that it adds to."""
    axes = len(conv.kernel_size)
    padding = tuple(map(int, conv.padding))  # never a word, as that of a convolution may be
    reaches = [(size - 1) * apart + 1 for size, apart in zip(conv.kernel_size, conv.dilation, strict=True)]
    pads: list[int] = []  # the last axis first
    for i in reversed(range(axes)):
        needed = (extents[i] - 1) * conv.stride[i] + reaches[i] - padding[i]
        pads += [padding[i], max(0, needed - maps_BOX.shape[2 + i])]
    found = F.pad(maps_BOX, pads)
    for i, extent in enumerate(extents):
        taps = found.unfold(2 + i, reaches[i], conv.stride[i])[..., :: conv.dilation[i]]
        found = taps.narrow(2 + i, 0, extent)
    return _as_columns(found, axes)
