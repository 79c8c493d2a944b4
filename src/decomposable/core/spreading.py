"""What the matrix of a transposed convolution sees: pixels of its input, and taps of its output's gradient.

Every pixel x of the input is multiplied with the whole kernel and added to the output at the kernel's taps, so in the
pointwise form y = Wᵀx is what one pixel adds there, and g the gradient at these taps: a patch of it, with zeros where
the padding cuts the output off. Σ x gᵀ over the pixels is ∂L/∂W.

Shape suffixes as in `moments.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from decomposable.core.layers import Transposed


def input_pixels(maps_BIX: Tensor, conv: Transposed) -> Tensor:
    """(B × I × P): the input at every position."""
    return maps_BIX.flatten(2)


def gradient_taps(maps_BOX: Tensor, conv: Transposed, extents: Sequence[int]) -> Tensor:
    """(B × O·kernel × P): for every one of these positions of the input, the gradient at the pixels that it adds to."""
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
    return found.flatten(2, 1 + axes).movedim(2, -1).flatten(1, -2)
