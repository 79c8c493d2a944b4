"""How much of an error in one layer arrives behind the next: in theory, and measured (appendix E).

An error ‖y_{ℓ−1} − ỹ_{ℓ−1}‖ behind one layer grows at most by ω_ℓ = ‖W̃_ℓ‖₂ until behind the next; for a convolution,
whose patches overlap, times √(⌈K_h/S_h⌉ ⌈K_w/S_w⌉). What is seen on data is

    ω̂_ℓ = max_n ‖W̃_ℓᵀ (x_ℓ − x̃_ℓ)‖ / ‖y_{ℓ−1} − ỹ_{ℓ−1}‖ ,

where x = φ(y) is whatever the network makes of y before the next layer, normalisation and pooling included. Ω_ℓ and Ω̂_ℓ
are the products over all later layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.forms import MATRIX_FORMS, to_matrix
from decomposable.core.layers import Convolution, Transposed
from decomposable.core.tracing import call_with_first, on_device_of
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.checks import check_count
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.analysis.watching import first_images, recorded

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lipschitz:
    """Hold the constants of a network's layers, in the order in which they run.

    The first layer has an empirical constant of NaN: nothing comes before it. So have layers that no error reaches;
    products leave them out.
    """

    names: tuple[str, ...]
    theoretical: Floats
    empirical: Floats

    @property
    def theoretical_products(self) -> Floats:
        """Return Ω_ℓ of every layer but the last."""
        return _products(self.theoretical)

    @property
    def empirical_products(self) -> Floats:
        """Return Ω̂_ℓ of every layer but the last."""
        return _products(self.empirical)


def _products(values: Floats) -> Floats:
    return np.asarray(np.cumprod(np.nan_to_num(values[:0:-1], nan=1.0))[::-1], dtype=np.float64)


@torch.no_grad()
def lipschitz(net: DecomposedNet, loader: Iterable[Any], *, images: int = 1000) -> Lipschitz:
    """Return the constants of a network at the size that it has, against the full one, on the first so many images.

    Of a network with branches, a layer is related to the one that ran before it.

    >>> from decomposable import decompose
    >>> net = decompose(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 6))
    >>> plan = net.resize_(ratio=0.5)
    >>> found = lipschitz(net, [torch.randn(16, 6)])
    >>> bool(found.empirical[1] <= found.theoretical[1]), found.theoretical_products.shape
    (True, (1,))
    """
    check_count("images", images)
    if net.plan().is_full:
        raise InvalidArgumentError("net: it has its full size, where there is no error; allowed: a smaller one")
    full, small = net.extract(net.selector.full_plan()).eval(), net.extract().eval()
    forms = {layer.name: layer.form for layer in net.layers}
    largest: dict[str, float] = {}
    for batch in first_images(loader, images, whole=False):
        x = on_device_of(full, batch)
        with recorded(full, forms) as seen, recorded(small, forms) as cut:
            call_with_first(full, x)
            call_with_first(small, x)
        before: str | None = None
        for name, (inputs, _) in seen.items():
            largest.setdefault(name, math.nan)
            if before is not None:
                layer = small.get_submodule(name)
                gone_in = (layer(inputs) - layer(cut[name][0])).double().flatten(1).norm(dim=1)
                error = (seen[before][1] - cut[before][1]).double().flatten(1).norm(dim=1)
                if bool((error > 0).any()):
                    found = float((gone_in / error)[error > 0].max())
                    largest[name] = found if math.isnan(largest[name]) else max(found, largest[name])
            before = name
    theoretical = [_constant(full.get_submodule(name), forms[name]) for name in largest]
    return Lipschitz(
        names=tuple(largest), theoretical=np.array(theoretical), empirical=np.array(list(largest.values()))
    )


def _constant(layer: nn.Module, form: Any) -> float:
    """‖W‖₂, which the cut leaves as it is; of a convolution, with the patches that a pixel is in."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    matrix = to_matrix(weight.double(), form if form in MATRIX_FORMS else "channel")
    norm = float(torch.linalg.matrix_norm(matrix, ord=2))
    if isinstance(layer, nn.Linear):
        return norm
    assert isinstance(layer, Convolution | Transposed)  # the latter is the adjoint of a convolution with its weight
    return norm * math.sqrt(math.prod(-(-k // s) for k, s in zip(layer.kernel_size, layer.stride, strict=True)))
