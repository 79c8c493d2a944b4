"""The divergence of a cut network's softmax from the full one's, and its bound (proposition 2).

For a fully connected network with 1-Lipschitz activations, layers 1 … L, outputs y of the full network, and ŷ_ℓ what
the cut layer ℓ gives for the *full* network's input,

    KL(p ‖ p̃) ≤ √( 2 ( ‖y_L − ŷ_L‖² + Σ_{ℓ<L} ‖y_ℓ − ŷ_ℓ‖² Π_{j>ℓ} ‖W_j‖₂² ) ) .
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.tracing import call_with_first, on_device_of
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.checks import check_count
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.analysis.watching import first_images, recorded

Floats = NDArray[np.float64]

_SLACK = 1e-6  # of rounding, in float32, where a difference is compared with another


@dataclass(frozen=True, kw_only=True, eq=False)
class Divergence:
    """Hold KL(p ‖ p̃) of every image at the current size, and its bound by proposition 2."""

    kl: Floats
    bound: Floats

    @property
    def holds(self) -> bool:
        """Return whether no image is above its bound."""
        return bool((self.kl <= self.bound * (1 + _SLACK) + _SLACK).all())

    @property
    def tightness(self) -> float:
        """Return the mean of KL over its bound: 1 would be a bound that is reached."""
        return float(np.mean(self.kl / np.maximum(self.bound, np.finfo(np.float64).tiny)))


@torch.no_grad()
def divergence(net: DecomposedNet, loader: Iterable[Any], *, images: int = 1000) -> Divergence:
    """Return both sides of proposition 2 for a fully connected network, at the size that it has.

    >>> from decomposable import decompose
    >>> net = decompose(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 6))
    >>> plan = net.resize_(ratio=0.5)
    >>> divergence(net, [torch.randn(16, 6)]).holds
    True
    """
    check_count("images", images)
    full, small = net.extract(net.selector.full_plan()).eval(), net.extract().eval()
    names = list(net.plan().ranks)
    _require_fully_connected(full, names)
    kl, bound = [], []
    for batch in first_images(loader, images, whole=False):
        x = on_device_of(full, batch)
        with recorded(full, names) as seen, recorded(small, names) as cut:
            logits, other = call_with_first(full, x), call_with_first(small, x)
        _require_chain(seen, cut)
        log_p, log_q = (each.double().log_softmax(dim=-1) for each in (logits, other))
        kl.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
        bound.append(_bound(full, small, seen))
    return Divergence(kl=torch.cat(kl).cpu().numpy(), bound=torch.cat(bound).cpu().numpy())


def _bound(full: nn.Module, small: nn.Module, seen: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the right-hand side, from the last layer to the first."""
    total, product = torch.zeros(()), 1.0
    for name, (inputs, outputs) in reversed(seen.items()):
        moved = (outputs - small.get_submodule(name)(inputs)).double().square().sum(dim=-1)
        total = total.to(moved) + moved * product
        product *= float(torch.linalg.matrix_norm(_weight(full, name).double(), ord=2)) ** 2
    return (2 * total).sqrt()


def _weight(full: nn.Module, name: str) -> Tensor:
    weight = full.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def _require_fully_connected(full: nn.Module, names: list[str]) -> None:
    """Refuse networks that the proposition does not speak of."""
    own = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    for name in names:
        if not isinstance(full.get_submodule(name), nn.Linear):
            kind = type(full.get_submodule(name)).__name__
            raise InvalidArgumentError(f"layer '{name}': a {kind}; allowed: fully connected networks (proposition 2)")
    for name, _ in (*full.named_parameters(), *full.named_buffers()):
        if name not in own:
            raise InvalidArgumentError(
                f"'{name}': not of a linear layer; allowed: linear layers and activations alone (proposition 2)"
            )


def _require_chain(full: dict[str, tuple[Tensor, Tensor]], cut: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse what is not 1-Lipschitz between two layers: what comes in must not differ by more than what went out."""
    names = list(full)
    for before, after in pairwise(names):
        if list(cut) != names:
            raise InvalidArgumentError(
                "net: its layers run in another order when it is cut; allowed: a chain of layers"
            )
        went_out = (full[before][1] - cut[before][1]).double().flatten(1).norm(dim=1)
        came_in = (full[after][0] - cut[after][0]).double().flatten(1).norm(dim=1)
        if bool((came_in > went_out * (1 + 1e-4) + 1e-5).any()):
            raise InvalidArgumentError(
                f"between '{before}' and '{after}': errors grow; allowed: a chain with 1-Lipschitz activations, as ReLU"
            )
