"""The factored network at given ranks, trained normally from scratch (section 4.4 of the paper).

It shows what the joint training is worth: the same layers and the same MACs as Decomposable-Net at one size, but the
two factors of a layer are ordinary weights from the first step on, and there is no other size.

Shape suffixes: M, N rows and columns of a weight's matrix; R its rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from decomposable.core.factors import memory_format_of
from decomposable.core.forms import check_matrix_form, matrix_form, matrix_shape, to_matrix
from decomposable.core.layers import ChainLayers, Layer, avoid_fast_paths_, find_layers, laid_out, require_layers
from decomposable.core.svd import check_finite, svd
from decomposable.core.tracing import on_device_of, other_macs, trace
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings
from decomposable.training.methods.base import CalibrationData
from decomposable_edge.checks import is_integer
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_lab.methods.base import LineStyle, Rival, Training
from decomposable_lab.methods.sized import MethodSize, SizedNet

_PAIRS = "_pairs_of_factors"  # attribute of a factored network: where its pairs are


@dataclass(frozen=True, kw_only=True)
class ScratchSettings(MethodSettings):
    """Hold its ranks."""

    ranks: tuple[int, ...] = ()  # of the layers in order

    compare_ranks: tuple[float, ...] = (0.25,)  # the sizes whose ranks Decomposable-Net gives

    swept: ClassVar[Mapping[str, str]] = {"ranks": "compare_ranks"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("ranks",), "ints of at least 1", lambda v: all(r >= 1 for r in v)),
        (("compare_ranks",), "parts of the MACs, as in 0.25,0.5", lambda v: v and all(0 < s <= 1 for s in v)),
    )


class Scratch(Rival):
    """Train the factored network normally; that is its only size."""

    name = "scratch"
    summary = "the factored network at given ranks, trained normally from scratch"
    label = "our ranks, trained from scratch"
    style = LineStyle(color="#56B4E9", marker="X", linestyle="none", markersize=10, zorder=8, place=7)
    settings = ScratchSettings
    decomposes = False

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse settings without ranks; how many, only the model tells."""
        check_matrix_form(settings.form, "scratch")
        if not settings.of(ScratchSettings).ranks:
            raise InvalidArgumentError(
                "ranks: none are given; allowed with method=scratch: the rank of every layer in order, such as "
                "plan.ranks of a trained network at one size; `decomposable-lab compare` takes Decomposable-Net's"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """Put two factors in place of every layer whose rank is not full: random, or from weights that were trained
        before the best of that rank.
        """
        self.check(settings, has_init=is_trained)
        ranks = settings.of(ScratchSettings).ranks
        return _factored(model, ranks, settings.form, _truncated_factors if is_trained else _fresh_factors)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> SizedNet:
        """Return the trained network at its one size."""
        structure = {
            "form": settings.form,
            "ranks": list(settings.of(ScratchSettings).ranks),
            "input_shape": list(material.example_input.shape[1:]),
        }
        size = _size_of(network, material.example_input)
        build = partial(_build, network)  # a copy of the whole copies the network in it, too
        return SizedNet(method=self.name, network=network, sizes=[size], build=build, structure=structure)

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the modules of a file; its ranks and form are those that count, whatever the settings say."""
        form, ranks = structure.get("form"), structure.get("ranks")
        if not isinstance(form, str) or not isinstance(ranks, list) or not all(map(is_integer, ranks)):
            raise ArtifactError(f"structure={dict(structure)!r:.80}; allowed: a form, and a list of ranks")
        network = _factored(model, ranks, form, _empty_factors)
        return network, partial(_build, network)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return the only size."""
        return _size_of(network, example_input)

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """Return one for each size, at the ranks that Decomposable-Net has there."""
        sizes = settings.of(ScratchSettings).compare_ranks
        return tuple(Training(curve="scratch", folder=f"{size:.12g}", ranks=size) for size in sizes)


def _factored(
    model: nn.Module, ranks: Sequence[int], form: str, factors_of: Callable[[Layer, int], tuple[Tensor, Tensor]]
) -> nn.Module:
    """The model with two factors in place of every layer whose rank is not full; it shares all else with the model.

    `factors_of(layer, rank)` gives P (M × R) and Q (R × N). Ranks are taken literally: two factors that cost more than
    the dense layer are two factors all the same.
    """
    model = unwrap(model)
    layers, skipped = find_layers(model, check_matrix_form(form, "scratch"))
    require_layers(layers, skipped)
    _check_ranks(layers, ranks)
    replacements: dict[nn.Module, nn.Module] = {}
    for layer, rank in zip(layers, ranks, strict=True):
        if rank == layer.full_ranks[0]:
            continue  # the dense layer itself
        weights = _weights(layer, *factors_of(layer, rank))
        for module in layer.modules:
            replacements[module] = ChainLayers(module, layer.chain).build(*weights)
    network = rewire(model, replacements)
    avoid_fast_paths_(network)
    pairs = set(replacements.values())
    network.__dict__[_PAIRS] = tuple(name for name, module in network.named_modules() if module in pairs)
    return network


def _check_ranks(layers: Sequence[Layer], ranks: Sequence[int]) -> None:
    """Refuse ranks that are not those of these layers."""
    if len(ranks) != len(layers):
        full = ", ".join(f"'{layer.name}' {layer.full_rank}" for layer in layers)
        raise InvalidArgumentError(
            f"ranks: {len(ranks)} are given; allowed: {len(layers)}, one for each layer, whose full ranks are {full}"
        )
    for layer, rank in zip(layers, ranks, strict=True):
        if not 1 <= rank <= layer.full_ranks[0]:
            raise InvalidArgumentError(
                f"ranks: layer '{layer.name}' got {rank}; allowed: 1 to {layer.full_rank}, and with that it is dense"
            )


def _weights(layer: Layer, p_MR: Tensor, q_RN: Tensor) -> list[nn.Parameter]:
    """Return the weights of the two layers, where and as the one weight was."""
    weight, format_ = layer.weight, memory_format_of(layer.weight)
    return [
        nn.Parameter(laid_out(factor.to(weight.device, weight.dtype), format_), requires_grad=weight.requires_grad)
        for factor in layer.chain.held(matrix_form(layer.form).stages_of(p_MR, q_RN, layer.shape))
    ]


@torch.no_grad()
def _fresh_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
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
    rows, columns = w_MN.shape
    variance = float(w_MN.double().square().mean())  # about zero, which initialisers have as their mean
    p_MR = torch.randn(rows, rank) / math.sqrt(rows)
    q_RN = torch.randn(rank, columns) * math.sqrt(variance * rows / rank)
    return p_MR, q_RN


@torch.no_grad()
def _truncated_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    """P = U_r √S_r and Q = √S_r V_rᵀ of the weight, for a model that is trained already."""
    u_MK, s_K, v_NK = svd({layer.name: to_matrix(layer.weight.detach(), layer.form)})[layer.name]
    root_R = s_K[:rank].sqrt()
    return u_MK[:, :rank] * root_R, root_R[:, None] * v_NK[:, :rank].mT


def _empty_factors(layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
    """Zeros, for weights that are loaded afterwards; no random number is drawn."""
    rows, columns = matrix_shape(layer.shape, layer.form)
    return torch.zeros(rows, rank), torch.zeros(rank, columns)


def _size_of(network: nn.Module, example_input: Any) -> MethodSize:
    """Return what a factored network costs, and what its model does.

    A pair of factors tells the dense layer it stands for, so that the model itself is not needed: the output channels
    of the second, the input channels of the first, and the product of the two kernels; the dense weight is applied
    wherever the second one is.
    """
    names = network.__dict__.get(_PAIRS)
    if names is None:
        raise InvalidArgumentError("network: it is not a factored one; allowed: what network() of this method made")
    seen = trace(network, on_device_of(network, example_input))
    macs, params = other_macs((), seen), sum(p.numel() for p in network.parameters())
    extra_macs, extra_params, ranks = 0, dict[Tensor, int](), []
    for name in names:
        first, second = network.get_submodule(name).children()
        one, other = cast(Tensor, first.weight), cast(Tensor, second.weight)
        dense = one.numel() * other.numel() // len(one) ** 2
        extra_macs += (dense - other.numel()) * seen.outputs.get(second, 0) - one.numel() * seen.outputs.get(first, 0)
        extra_params[one] = dense - one.numel() - other.numel()  # layers may share weights
        ranks.append(len(one))
    return MethodSize(
        name=f"ranks {min(ranks)}-{max(ranks)}" if ranks else "full ranks",
        value=1.0,  # there is only one
        macs=macs,
        params=params,
        full_macs=macs + seen.per_sample(extra_macs),
        full_params=params + sum(extra_params.values()),
    )


def _build(network: nn.Module, size: MethodSize) -> nn.Module:
    """Return the network with tensors of its own, and no trace of where its factors are."""
    copy = deep_copy(network)
    copy.__dict__.pop(_PAIRS, None)
    return copy


METHOD = Scratch()
