"""The network whose layers are pairs of factors of given ranks, and what it costs.

Shape suffixes: M, N rows and columns of a weight's matrix; R its rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import memory_format_of
from decomposable.core.forms import check_form, first_weight, matrix_shape, second_weight, to_matrix
from decomposable.core.layers import Layer, TwoFactors, avoid_fast_paths_, find_layers, laid_out, require_layers
from decomposable.core.svd import check_finite, svd
from decomposable.core.tracing import on_device_of, other_macs, trace
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.errors import InvalidArgumentError
from decomposable.network.sized import Size

FactorsOf = Callable[[Layer, int], tuple[Tensor, Tensor]]
_PAIRS = "_pairs_of_factors"  # attribute of a factored network: where its pairs are


def factored(model: nn.Module, ranks: Sequence[int], form: str, factors_of: FactorsOf) -> nn.Module:
    """The model with two factors in place of every layer whose rank is not full; it shares all else with the model.

    `factors_of(layer, rank)` gives P (M × R) and Q (R × N). Ranks are taken literally: two factors that cost more than
    the dense layer are two factors all the same.
    """
    model = unwrap(model)
    layers, skipped = find_layers(model, check_form(form))
    require_layers(layers, skipped)
    check_ranks(layers, ranks)
    replacements: dict[nn.Module, nn.Module] = {}
    for layer, rank in zip(layers, ranks, strict=True):
        if rank == layer.full_rank:
            continue  # the dense layer itself
        first, second = _weights(layer, *factors_of(layer, rank))
        for module in layer.modules:
            replacements[module] = TwoFactors(module, layer.form).build(first, second)
    network = rewire(model, replacements)
    avoid_fast_paths_(network)
    pairs = set(replacements.values())
    network.__dict__[_PAIRS] = tuple(name for name, module in network.named_modules() if module in pairs)
    return network


def _weights(layer: Layer, p_MR: Tensor, q_RN: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """The weights of the two layers, where and as the one weight was."""
    weight, format_ = layer.weight, memory_format_of(layer.weight)
    first, second = (
        nn.Parameter(laid_out(factor.to(weight.device, weight.dtype), format_), requires_grad=weight.requires_grad)
        for factor in (first_weight(p_MR, layer.shape, layer.form), second_weight(q_RN, layer.shape, layer.form))
    )
    return first, second


def check_ranks(layers: Sequence[Layer], ranks: Sequence[int]) -> None:
    """Refuse ranks that are not those of these layers."""
    if len(ranks) != len(layers):
        full = ", ".join(f"'{layer.name}' {layer.full_rank}" for layer in layers)
        raise InvalidArgumentError(
            f"ranks: {len(ranks)} are given; allowed: {len(layers)}, one for each layer, whose full ranks are {full}"
        )
    for layer, rank in zip(layers, ranks, strict=True):
        if not 1 <= rank <= layer.full_rank:
            raise InvalidArgumentError(
                f"ranks: layer '{layer.name}' got {rank}; allowed: 1 to {layer.full_rank}, and with that it is dense"
            )


@torch.no_grad()
def fresh_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    """Random factors whose product has entries of the variance that the model's own initial weight has.

    An entry of P Q is a sum over R products of independent entries, so its variance is R · var(P) · var(Q). With

        var(P) = 1/M          the first layer's fan-in is M: its outputs have the variance of its inputs
        var(Q) = var(W) M/R   so that R · var(P) · var(Q) = var(W),

    whatever the initialiser of W is. Where it is He's, var(W) = 2/(I H W), the second layer is started by He's rule,
    too: for the channel form M = I H W, var(Q) = 2/R and its fan-in is R; for the spatial form M = I W,
    var(Q) = 2/(R H) and its fan-in is R H. Nothing lies between the two layers, hence no gain of 2 for the first.

    The numbers are drawn on the CPU from torch's global generator, so that they are the same on every device.
    """
    w_MN = to_matrix(layer.weight.detach(), layer.form)
    check_finite(layer.name, w_MN)
    rows, columns = matrix_shape(layer.shape, layer.form)
    variance = float(w_MN.double().square().mean())  # about zero, which initialisers have as their mean
    p_MR = torch.randn(rows, rank) / math.sqrt(rows)
    q_RN = torch.randn(rank, columns) * math.sqrt(variance * rows / rank)
    return p_MR, q_RN


@torch.no_grad()
def truncated_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    """P = U_r √S_r and Q = √S_r V_rᵀ of the weight, for a model that is trained already."""
    u_MK, s_K, v_NK = svd({layer.name: to_matrix(layer.weight.detach(), layer.form)})[layer.name]
    root_R = s_K[:rank].sqrt()
    return u_MK[:, :rank] * root_R, root_R[:, None] * v_NK[:, :rank].mT


def empty_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    """Zeros, for weights that are loaded afterwards; no random number is drawn."""
    rows, columns = matrix_shape(layer.shape, layer.form)
    return torch.zeros(rows, rank), torch.zeros(rank, columns)


def size_of(network: nn.Module, example_input: Any) -> Size:
    """What a factored network costs, and what its model does.

    A pair of factors tells the dense layer it stands for, so that the model itself is not needed: the output channels
    of the second, the input channels of the first, and the product of the two kernels; the dense weight is applied
    wherever the second one is.
    """
    pairs = _pairs_of(network)
    seen = trace(network, on_device_of(network, example_input))
    macs, params = other_macs((), seen), sum(p.numel() for p in network.parameters())
    extra_macs, dense_params = 0, {}
    for first, second in pairs:
        dense = _dense_size(first, second)
        applied = dense * seen.outputs.get(second, 0)
        factors = sum(part.weight.numel() * seen.outputs.get(part, 0) for part in (first, second))
        extra_macs += applied - factors
        dense_params[first.weight] = dense - first.weight.numel() - second.weight.numel()  # layers may share weights
    ranks = [len(first.weight) for first, _ in pairs]
    return Size(
        name=f"ranks {min(ranks)}-{max(ranks)}" if ranks else "full ranks",
        value=1.0,  # there is only one
        macs=macs,
        params=params,
        full_macs=macs + seen.per_sample(extra_macs),
        full_params=params + sum(dense_params.values()),
    )


def _pairs_of(network: nn.Module) -> list[tuple[Any, Any]]:
    names = network.__dict__.get(_PAIRS)
    if names is None:
        raise InvalidArgumentError("network: it is not a factored one; allowed: what network() of this method made")
    pairs = [network.get_submodule(name) for name in names]
    return [(first, second) for first, second in (pair.children() for pair in pairs)]


def _dense_size(first: Any, second: Any) -> int:
    """Weights of the one layer that two factors stand for.

    >>> _dense_size(nn.Conv2d(4, 2, (1, 5)), nn.Conv2d(2, 8, (3, 1))), _dense_size(nn.Linear(4, 2), nn.Linear(2, 8))
    (480, 32)
    """
    per_basis = first.weight[0].numel() * second.weight[:, 0].numel()
    return int(per_basis)


def plain_copy(network: nn.Module) -> nn.Module:
    """The network with tensors of its own, and no trace of where its factors are."""
    copy = deep_copy(network)
    copy.__dict__.pop(_PAIRS, None)
    return copy
