"""The plain layers that stand in for a convolution or linear layer, and the factors in them.

========  ======================================================================================
form      layers, in order
========  ======================================================================================
tucker    1×1 convolution I → S; H×W convolution S → R with stride, padding and dilation; 1×1 convolution R → O, bias
channel   H×W convolution I → R with the geometry; 1×1 convolution R → O, bias
spatial   1×W convolution I → R with the geometry of x; H×1 convolution R → O with that of y, bias
========  ======================================================================================

A Tucker mode that is left whole has no 1×1 convolution. Padding of any kind acts before or after a 1×1 convolution
without bias alike, so it can stay with the core.

Shape suffixes as in `forms.py` and `tensors.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from decomposable.core.forms import first_weight, matrix_shape, second_weight, to_factors, to_matrix
from decomposable.core.layers import Decomposable, TwoFactors
from decomposable.core.svd import svd
from decomposable.methods.tucker.tensors import ModeRanks, Tucker2, decomposed_again, tucker2

FactorForm = Literal["tucker", "channel", "spatial"]
Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)

Kept = tuple[int | None, ...]
"""The ranks of a layer: (R, S) for Tucker, (R,) for two factors. None leaves a mode whole; all None is dense."""


class Pair(NamedTuple):
    """W ≈ p · q."""

    p: Tensor  # (M, R)
    q: Tensor  # (R, N)


Factors = Tucker2 | Pair


def decompose(w_OIHW: Tensor, form: FactorForm, kept: Kept) -> Factors:
    """The factors of a weight: Tucker-2, or U√S and √S Vᵀ of the form's matrix. In float64."""
    if form == "tucker":
        return tucker2(w_OIHW, _modes(kept))
    return _split(to_matrix(w_OIHW.detach().double(), form), kept)


def decompose_again(factors: Factors, kept: Kept) -> Factors:
    """The factors, at smaller ranks, of the weight that others stand for.

    For two factors P = Q_P A and Qᵀ = Q_Q Bᵀ, with orthonormal columns in Q_P and Q_Q, the SVD of P Q is that of A B
    between them: as small as the rank.
    """
    if isinstance(factors, Tucker2):
        return decomposed_again(factors, _modes(kept))
    with torch.no_grad():
        left_MR, a_RR = torch.linalg.qr(factors.p.double())
        right_NR, b_RR = torch.linalg.qr(factors.q.double().mT)
        p, q = _split(a_RR @ b_RR.mT, kept)
        return Pair(left_MR @ p, q @ right_NR.mT)


def _modes(kept: Kept) -> ModeRanks:
    out_rank, in_rank = kept
    return out_rank, in_rank


def _split(w_MN: Tensor, kept: Kept) -> Pair:
    u_MK, s_K, v_NK = svd({"weight": w_MN})["weight"]
    root_R = s_K[: kept[0]].sqrt()
    rank = len(root_R)
    return Pair(u_MK[:, :rank] * root_R, root_R[:, None] * v_NK[:, :rank].mT)


def empty_factors(shape: Sequence[int], form: FactorForm, kept: Kept) -> Factors:
    """Factors of the right shapes, all 0, to be filled from a file."""
    if form == "tucker":
        (out_rank, in_rank), (out_channels, in_channels) = kept, shape[:2]
        core = torch.zeros(out_rank or out_channels, in_rank or in_channels, *shape[2:])
        u = None if out_rank is None else torch.zeros(out_channels, out_rank)
        return Tucker2(core, u, None if in_rank is None else torch.zeros(in_channels, in_rank))
    rows, columns = matrix_shape(shape, form)
    rank = kept[0] or 0
    return Pair(torch.zeros(rows, rank), torch.zeros(rank, columns))


def parameters_for(shape: Sequence[int], form: FactorForm, factors: Factors, like: Tensor) -> list[nn.Parameter]:
    """The weights of the layers in order; of the type, on the device and as trainable as the weight they replace."""
    if isinstance(factors, Pair):
        assert form != "tucker"
        weights = [first_weight(factors.p, shape, form), second_weight(factors.q, shape, form)]
    else:
        core, u_OR, v_IS = factors
        weights = [] if v_IS is None else [v_IS.mT[:, :, None, None]]
        weights += [core] if u_OR is None else [core, u_OR[:, :, None, None]]
    return [nn.Parameter(w.to(like).contiguous(), requires_grad=like.requires_grad) for w in weights]


def stand_in(module: Decomposable, form: FactorForm, kept: Kept, weights: Sequence[nn.Parameter]) -> nn.Sequential:
    """The plain layers, with these weights, that stand in for a dense one."""
    if form == "tucker":
        assert isinstance(module, nn.Conv2d)
        layers = _tucker_layers(module, kept, weights, module._parameters["bias"])
    else:
        layers = TwoFactors(module, form).build(*weights)
    return layers.train(module.training)


def smaller_stand_in(
    layers: nn.Sequential, form: FactorForm, before: Kept, kept: Kept, weights: Sequence[nn.Parameter]
) -> nn.Sequential:
    """The plain layers at other ranks, with these weights, in place of those that `stand_in` made."""
    bias = layers[-1].bias
    assert bias is None or isinstance(bias, nn.Parameter)
    if form == "tucker":
        core = layers[0 if before[1] is None else 1]
        assert isinstance(core, nn.Conv2d)
        smaller = _tucker_layers(core, kept, weights, bias)
    else:
        first, second = layers
        smaller = nn.Sequential(_like(first, weights[0], None), _like(second, weights[1], bias))
    return smaller.train(layers.training)


def factors_in(layers: nn.Sequential, form: FactorForm, kept: Kept) -> Factors:
    """What `stand_in` was made from, as it is after training."""
    weights = [cast(Tensor, layer.weight).detach() for layer in layers]
    if form != "tucker":
        return Pair(*to_factors(weights[0], weights[1], form))
    out_rank, in_rank = kept
    v = None if in_rank is None else weights.pop(0)[:, :, 0, 0].mT
    u = None if out_rank is None else weights.pop()[:, :, 0, 0]
    return Tucker2(weights[0], u, v)


def _tucker_layers(
    conv: nn.Conv2d, kept: Kept, weights: Sequence[nn.Parameter], bias: nn.Parameter | None
) -> nn.Sequential:
    """1×1, the core with the geometry of `conv`, 1×1; the last of them has the bias."""
    place = 0 if kept[1] is None else 1
    biases = [None] * (len(weights) - 1) + [bias]
    pairs = enumerate(zip(weights, biases, strict=True))
    return nn.Sequential(*(_like(conv, w, b) if i == place else _pointwise(w, b) for i, (w, b) in pairs))


def _pointwise(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Conv2d:
    return _filled(nn.Conv2d(weight.shape[1], weight.shape[0], 1, bias=False, device="meta"), weight, bias)


def _like(layer: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Conv2d | nn.Linear:
    """A layer with the geometry of another one and the numbers of channels that the weight has."""
    if isinstance(layer, nn.Linear):
        return _filled(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), weight, bias)
    assert isinstance(layer, nn.Conv2d)
    conv = nn.Conv2d(
        weight.shape[1],
        weight.shape[0],
        kernel_size=(weight.shape[2], weight.shape[3]),
        stride=_two(layer.stride),
        padding=layer.padding if isinstance(layer.padding, str) else _two(layer.padding),
        dilation=_two(layer.dilation),
        bias=False,
        padding_mode=layer.padding_mode,
        device="meta",
    )
    return _filled(conv, weight, bias)


def _two(values: Sequence[int]) -> tuple[int, int]:
    y, x = values
    return y, x


def _filled(layer: Layer, weight: nn.Parameter, bias: nn.Parameter | None) -> Layer:
    layer._parameters.update(weight=weight, bias=bias)
    return layer


def form_of(shape: Sequence[int], form: FactorForm) -> FactorForm:
    """The form that a weight of this shape takes: 1×1 kernels and linear layers have no core, so they are a matrix.

    >>> form_of((8, 4, 1, 1), "tucker"), form_of((8, 4, 3, 3), "tucker")
    ('channel', 'tucker')
    """
    return "channel" if all(size == 1 for size in shape[2:]) else form
