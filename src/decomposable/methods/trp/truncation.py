"""Truncation of weights in place to a part of their energy, and the nuclear norm's subgradient at what is left.

Shape suffixes: M, N rows and columns of a weight's matrix; R the bases that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.core.criteria import Scores
from decomposable.core.criteria import energy as missing_energy
from decomposable.core.forms import check_form, to_matrix, to_weight
from decomposable.core.layers import FilterFn, Layer, find_layers, require_layers
from decomposable.core.svd import SVD, svd
from decomposable.core.tree import plain_name, unwrap
from decomposable.errors import InvalidArgumentError
from decomposable.methods.settings import Settings
from decomposable.methods.trp.settings import TRPSettings


def layer_filter(network: nn.Module, settings: Settings) -> FilterFn | None:
    """Which layers take part: all that can be decomposed, or as in the authors' code the "inner" ones, convolutions
    except the first and those of 1 × 1.
    """
    if settings.of(TRPSettings).trp_layers == "all":
        return None
    # By name: it is asked about copies of the network, too.
    convolutions = (plain_name(name) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)

    def is_inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Conv2d) and name != first and tuple(module.kernel_size) != (1, 1)

    return is_inner


def selected_layers(network: nn.Module, settings: Settings) -> tuple[Layer, ...]:
    """The layers that are truncated."""
    network = unwrap(network)
    layers, skipped = find_layers(network, check_form(settings.form), layer_filter(network, settings))
    if not layers and settings.of(TRPSettings).trp_layers == "inner":
        raise InvalidArgumentError(
            "trp_layers=inner: the model has no convolution but the first and those of 1 × 1; allowed: all"
        )
    require_layers(layers, skipped)
    return layers


def truncate_network_(network: nn.Module, settings: Settings) -> dict[str, int]:
    """Truncate every selected layer in place; the ranks kept come back by name.

    >>> model = nn.Linear(3, 3, bias=False)
    >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0, 0.1])))
    >>> truncate_network_(model, Settings(trp_energy=0.99))
    {'': 2}
    >>> round(model.weight[2, 2].item(), 6)
    0.0
    """
    return ranks_of(truncate_(selected_layers(network, settings), settings.of(TRPSettings).trp_energy))


def ranks_of(kept: Mapping[str, SVD]) -> dict[str, int]:
    """How many bases of each layer there are."""
    return {name: len(bases.s) for name, bases in kept.items()}


def rank_for(sigma: Scores, energy: float) -> int:
    """The smallest rank r with Σ_{i≤r} σ_i² ≥ e Σ σ_i², and at least 1.

    It is counted by what is missing: 1 − e is a small number, and its digits would be lost in a sum from the large end.

    >>> rank_for(np.array([3.0, 2.0, 0.1]), 0.99), rank_for(np.array([3.0, 2.0, 0.1]), 1.0), rank_for(np.zeros(3), 1.0)
    (2, 3, 1)
    """
    return max(1, int((missing_energy(sigma) > 1 - energy).sum()))


@torch.no_grad()
def truncate_(layers: Sequence[Layer], energy: float) -> dict[str, SVD]:
    """W ← U_r S_r V_rᵀ for every layer, with r of `rank_for`; U_r, S_r and V_r come back by name.

    The parameter stays the same object, in the same layout. Bases with σ = 0 (to rounding) are not counted as kept, and
    a weight from which nothing else is dropped is not written at all: with e = 1 every weight keeps its bits.
    """
    matrices = {layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in layers}
    with torch.autocast(layers[0].weight.device.type, enabled=False):
        decompositions = svd(matrices)
        sigmas = _on_the_host([decompositions[layer.name].s for layer in layers])
        kept = {}
        for layer, sigma in zip(layers, sigmas, strict=True):
            decomposition = decompositions[layer.name]
            most = max(1, decomposition.numerical_rank)
            rank = min(rank_for(sigma, energy), most)
            if rank < most:
                w_MN = _low_rank(matrices[layer.name], decomposition, rank)
                layer.weight.copy_(to_weight(w_MN, layer.shape, layer.form))
            u_MR, v_NR = decomposition.u[:, :rank], decomposition.v[:, :rank]
            kept[layer.name] = SVD(u_MR, decomposition.s[:rank], v_NR)
    return kept


def _on_the_host(values: Sequence[Tensor]) -> list[Scores]:
    """Every layer's singular values in numpy, in one transfer."""
    together = torch.cat([value.double() for value in values]).cpu().numpy()
    return np.split(together, np.cumsum([len(value) for value in values])[:-1])


def _low_rank(w_MN: Tensor, decomposition: SVD, rank: int) -> Tensor:
    """U_r S_r V_rᵀ: the bases that are kept or, where they are fewer, W without those that are dropped."""
    u_MK, s_K, v_NK = decomposition
    if 2 * rank <= len(s_K):
        return (u_MK[:, :rank] * s_K[:rank]) @ v_NK[:, :rank].mT
    return w_MN.to(s_K.dtype) - (u_MK[:, rank:] * s_K[rank:]) @ v_NK[:, rank:].mT


@torch.no_grad()
def add_subgradients_(layers: Sequence[Layer], kept: Mapping[str, SVD], strength: float) -> None:
    """Add τ U_r V_rᵀ to the gradient of every weight: a subgradient of τ‖W‖_* = τ Σσ at W = U_r S_r V_rᵀ.

    All of them are U_r V_rᵀ + Z with Z orthogonal to these bases and ‖Z‖₂ ≤ 1; this one leaves the bases that were
    dropped alone.
    """
    for layer in layers:
        weight, bases = layer.weight, kept[layer.name]
        if strength == 0 or not weight.requires_grad:
            continue
        if weight.grad is None:  # the pass did not come by
            weight.grad = torch.zeros_like(weight)
        uv_MN = bases.u @ bases.v.mT
        weight.grad.add_(to_weight(uv_MN, layer.shape, layer.form).to(weight.grad.dtype), alpha=strength)
