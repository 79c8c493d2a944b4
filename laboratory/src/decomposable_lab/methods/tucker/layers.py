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
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from decomposable.core.forms import FORMS, form_for, matrix_form, matrix_shape, to_factors, to_matrix
from decomposable.core.layers import KINDS, ChainLayers, Convolution, Decomposable, in_order
from decomposable.core.svd import svd
from decomposable_lab.methods.tucker.tensors import Kept, Tucker2, decomposed_again, tucker2

FactorForm = Literal["tucker", "channel", "spatial"]


def form_of(shape: Sequence[int], form: FactorForm) -> FactorForm:
    """Return the form for a weight of this shape: 1×1 kernels and linear layers have no core, so they are a matrix.

    >>> form_of((8, 4, 1, 1), "tucker"), form_of((8, 4, 3, 3), "tucker")
    ('channel', 'tucker')
    """
    return cast(FactorForm, form_for(shape, form))


class Pair(NamedTuple):
    """Hold W ≈ p · q."""

    p: Tensor  # (M, R)
    q: Tensor  # (R, N)


Factors = Tucker2 | Pair


def decompose(w_OIHW: Tensor, form: FactorForm, kept: Kept) -> Factors:
    """Return the factors of a weight: Tucker-2, or U√S and √S Vᵀ of the form's matrix. In float64."""
    if form == "tucker":
        return tucker2(w_OIHW, kept)
    return _split(to_matrix(w_OIHW.detach().double(), form), kept)


def decompose_again(factors: Factors, kept: Kept) -> Factors:
    """Return the factors, at smaller ranks, of the weight that others stand for.

    For two factors P = Q_P A and Qᵀ = Q_Q Bᵀ, with orthonormal columns in Q_P and Q_Q, the SVD of P Q is that of A B
    between them: as small as the rank.
    """
    if isinstance(factors, Tucker2):
        return decomposed_again(factors, kept)
    with torch.no_grad():
        left_MR, a_RR = torch.linalg.qr(factors.p.double())
        right_NR, b_RR = torch.linalg.qr(factors.q.double().mT)
        p, q = _split(a_RR @ b_RR.mT, kept)
        return Pair(left_MR @ p, q @ right_NR.mT)


def _split(w_MN: Tensor, kept: Kept) -> Pair:
    u_MK, s_K, v_NK = svd({"weight": w_MN})["weight"]
    root_R = s_K[: kept[0]].sqrt()
    rank = len(root_R)
    return Pair(u_MK[:, :rank] * root_R, root_R[:, None] * v_NK[:, :rank].mT)


def empty_factors(shape: Sequence[int], form: FactorForm, kept: Kept) -> Factors:
    """Return factors of the right shapes, all 0, to be filled from a file."""
    if form == "tucker":
        (out_rank, in_rank), (out_channels, in_channels) = kept, shape[:2]
        core = torch.zeros(out_rank or out_channels, in_rank or in_channels, *shape[2:])
        u = None if out_rank is None else torch.zeros(out_channels, out_rank)
        return Tucker2(core, u, None if in_rank is None else torch.zeros(in_channels, in_rank))
    rows, columns = matrix_shape(shape, form)
    rank = kept[0] or 0
    return Pair(torch.zeros(rows, rank), torch.zeros(rank, columns))


def parameters_for(shape: Sequence[int], form: FactorForm, factors: Factors, like: Tensor) -> list[nn.Parameter]:
    """Return the weights of the layers in order; of the type, device and trainability of the weight they replace."""
    if isinstance(factors, Pair):
        assert form != "tucker"
        weights = [*matrix_form(form).stages_of(factors.p, factors.q, shape)]
    else:
        core, u_OR, v_IS = factors
        ones = (1,) * (core.dim() - 2)
        weights = [] if v_IS is None else [v_IS.mT.reshape(*v_IS.mT.shape, *ones)]
        weights += [core] if u_OR is None else [core, u_OR.reshape(*u_OR.shape, *ones)]
    return [nn.Parameter(in_order(w.to(like)), requires_grad=like.requires_grad) for w in weights]


def stand_in(module: Decomposable, form: FactorForm, kept: Kept, weights: Sequence[nn.Parameter]) -> nn.Sequential:
    """Return the plain layers, with these weights, that stand in for a dense one."""
    if form == "tucker":
        assert isinstance(module, Convolution)
        return _tucker_layers(module, kept, weights, module._parameters["bias"]).train(module.training)
    return ChainLayers(module, FORMS[form].chain(module.weight.shape)).build(*weights)


def smaller_stand_in(
    layers: nn.Sequential, form: FactorForm, before: Kept, kept: Kept, weights: Sequence[nn.Parameter]
) -> nn.Sequential:
    """Return the plain layers at other ranks, with these weights, in place of those that `stand_in` made."""
    bias = layers[-1]._parameters["bias"]
    if form == "tucker":
        smaller = _tucker_layers(layers[0 if before[1] is None else 1], kept, weights, bias)
    else:
        first, second = layers
        smaller = nn.Sequential(_layer(weights[0], None, first), _layer(weights[1], bias, second))
    return smaller.train(layers.training)


def factors_in(layers: nn.Sequential, form: FactorForm, kept: Kept) -> Factors:
    """Return what `stand_in` was made from, as it is after training."""
    weights = [cast(Tensor, layer.weight).detach() for layer in layers]
    if form != "tucker":
        return Pair(*to_factors(weights[0], weights[1]))
    out_rank, in_rank = kept
    v = None if in_rank is None else weights.pop(0).flatten(1).mT
    u = None if out_rank is None else weights.pop().flatten(1)
    return Tucker2(weights[0], u, v)


def _tucker_layers(
    conv: nn.Module, kept: Kept, weights: Sequence[nn.Parameter], bias: nn.Parameter | None
) -> nn.Sequential:
    """1×1, the core with the geometry of `conv`, 1×1; the last of them has the bias."""
    place, last = (0 if kept[1] is None else 1), len(weights) - 1
    return nn.Sequential(
        *(_layer(w, bias if i == last else None, conv if i == place else None) for i, w in enumerate(weights))
    )


def _layer(weight: nn.Parameter, bias: nn.Parameter | None, like: nn.Module | None) -> nn.Module:
    """Return a layer with this weight, and the geometry of another one."""
    outputs, inputs, *kernel = weight.shape
    layer: nn.Module
    if kernel:
        geometry: dict[str, Any] = {"kernel_size": tuple(kernel)}
        if like is not None:
            geometry |= {name: getattr(like, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        layer = KINDS[len(kernel)](inputs, outputs, bias=False, device="meta", **geometry)
    else:
        layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer._parameters.update(weight=weight, bias=bias)
    return layer
