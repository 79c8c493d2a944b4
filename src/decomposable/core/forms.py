"""The forms that a weight can be decomposed in: how it becomes a chain of plain layers, and what that is cut to.

Three forms make a matrix of the weight, the matrix two factors, and these the weights of two layers. Section 2 of the
paper leaves open which axes become rows and which columns; its experiments (section 4) have the first two:

=========  ==========================  =============================  ===========================
form       matrix W (M × N)            first factor, U                second factor, S·Vᵀ
=========  ==========================  =============================  ===========================
channel    (I·H·W) × O                 H×W convolution, I → R         1×1 convolution, R → O
spatial    (I·W) × (O·H)               1×W convolution, I → R         H×1 convolution, R → O
pointwise  I × (O·H·W)                 1×1 convolution, I → R         H×W transposed, R → O
=========  ==========================  =============================  ===========================

A linear layer is the channel form without a kernel. The pointwise form is that of transposed convolutions: their output
has more positions than their input, so the 1×1 layer is cheapest before them. Tucker-2, the extension that the paper
names, cuts both channel axes by the SVDs of the two unfoldings (HOSVD):

    W̃ = W ×_I P_a ×_O P_b        P_a, P_b: projections onto the leading left singular vectors of W's two unfoldings

    1×1, I → a  ──┆──  kernel, a → b  ──┆──  1×1, b → O        U_aᵀ,  C = W ×_I U_aᵀ ×_O U_bᵀ,  U_b

Any (a, b) is a slice of the one full core. A basis scores by the singular value of its own unfolding.

Shape suffixes: O, I output and input channels, A, B the ranks of Tucker's cuts, and behind them the kernel's axes, H, W
or K in one; M, N rows and columns of a matrix, R bases of its cut (the rank), and K all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor

from decomposable.core.svd import (
    SVD,
    CutFrom,
    Left,
    left_svd,
    numerical_rank,
    project,
    project_left,
    projection_gradient,
    svd,
    truncate,
)
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Axes, Chain

Shape = Sequence[int]


@dataclass(eq=False)
class Form:
    """Hold what all forms have: names, which weights they are for, and which axes of the kernel each stage has.

    A subclass says how weights are decomposed, and what they are cut to in training; `MatrixForm` shows the methods.
    Costs, plans, slices, storage, exports and the device know a form's chain, and nothing of the form.
    """

    name: str
    short: str  # in the names of curves
    takes: Callable[[Shape], bool]  # whether a weight has something to split; others take the channel form
    stages: Callable[[int], tuple[Axes, ...]]  # by the number of the kernel's axes, which of them each stage has

    def chain(self, shape: Shape, *, transposed: bool = False) -> Chain:
        """Return the chain that a weight of this shape becomes, or that of a transposed convolution."""
        return Chain(tuple(shape), self.stages(len(shape) - 2), transposed)


class MatrixForm(Form):
    """Decompose weights as matrices: rows are the inputs with the first stage's axes, columns the outputs with the
    second's.
    """

    bases = SVD

    def _axes(self, shape: Shape) -> tuple[list[int], list[int]]:
        """Return the weight's axes that make up the rows, and the columns."""
        first, second = self.stages(len(shape) - 2)
        return [1, *(2 + i for i, own in enumerate(first) if own)], [0, *(2 + i for i, own in enumerate(second) if own)]

    def matrix_shape(self, shape: Shape) -> tuple[int, int]:
        """Return (M, N) of a weight of this shape."""
        rows, columns = (math.prod(shape[axis] for axis in axes) for axes in self._axes(shape))
        return rows, columns

    def to_matrix(self, w_OIHW: Tensor) -> Tensor:
        """Return the matrix W of the paper, so that y = Wᵀx. Exact: only the axes move."""
        rows, columns = self._axes(w_OIHW.shape)
        return w_OIHW.permute(*rows, *columns).reshape(self.matrix_shape(w_OIHW.shape))

    def to_weight(self, w_MN: Tensor, shape: Shape) -> Tensor:
        """Return the weight of a matrix: the inverse of `to_matrix`."""
        rows, columns = self._axes(shape)
        order = [*rows, *columns]
        apart = w_MN.reshape([shape[axis] for axis in order])
        return apart.permute([order.index(axis) for axis in range(len(order))])

    def stages_of(self, p_MR: Tensor, q_RN: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        """Return the weights of the two layers, input → R bases → output, for W̃ = P Q."""
        rank, (first, second) = p_MR.shape[1], self.chain(shape).kernels
        return (
            p_MR.mT.reshape(rank, shape[1], *first),
            q_RN.reshape(rank, shape[0], *second).transpose(0, 1),
        )

    def decompose(self, weights: Mapping[str, Tensor]) -> dict[str, SVD]:
        """Return the bases of every weight, in few calls; NaN and infinity raise `NonFiniteError` with the name."""
        return svd({name: self.to_matrix(weight) for name, weight in weights.items()})

    def project(self, weight: Tensor, kept: Any) -> SVD:
        """Return the weight along bases that were kept from an earlier one, sorted by their singular values again."""
        return project(self.to_matrix(weight), kept)

    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that bases consist of, by name."""
        (rows, columns), rank = self.matrix_shape(chain.shape), chain.full_ranks[0]
        return {"u": (rows, rank), "s": (rank,), "v": (columns, rank)}

    def influences(self, gradient: Tensor, weight: Tensor, bases: Any) -> tuple[Tensor, ...]:
        """Return |σ_i · ∂L/∂σ_i| of every cut's bases, to first order what the loss changes by where a basis goes.

        Here ∂L/∂σ_i = u_iᵀ (∂L/∂W) v_i.
        """
        u_MK, s_K, v_NK = bases
        g_MN = self.to_matrix(gradient).to(s_K.dtype)
        return (s_K * ((u_MK.mT @ g_MN) * v_NK.mT).sum(dim=1).abs(),)

    def weights(self, weight: Tensor, bases: Any, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the weights of all stages at full rank, every cut's bases in the order given.

        They are U √S and √S Vᵀ: √σ is on both sides, which keeps them of one scale.
        """
        u_MK, s_K, v_NK = bases
        (order,) = orders
        root_K = s_K[order].sqrt()
        return self.stages_of(u_MK[:, order] * root_K, root_K[:, None] * v_NK[:, order].mT, weight.shape)

    def truncate(self, weight: Tensor, bases: Any, ranks: Sequence[int], added_gap: float = 0.0) -> tuple[Tensor, ...]:
        """Return the weights of all stages at these ranks, differentiable in the weight that has these bases."""
        p_MR, q_RN = truncate(self.to_matrix(weight), bases, ranks[0], added_gap)
        return self.stages_of(p_MR, q_RN, weight.shape)


_INPUTS, _OUTPUTS = 1, 0  # the axes of a weight


class HOSVD(NamedTuple):
    """Hold all left singular vectors of a weight's two unfoldings, and their singular values."""

    u_in: Tensor  # (I, I)
    s_in: Tensor
    u_out: Tensor  # (O, O)
    s_out: Tensor

    @property
    def spectra(self) -> tuple[Tensor, ...]:
        """Return the singular values of the cut behind the inputs, and of the cut before the output."""
        return self.s_in, self.s_out

    @property
    def sides(self) -> tuple[tuple[int, Left], ...]:
        """Return each unfolding's axis and left side."""
        return (_INPUTS, Left(self.u_in, self.s_in)), (_OUTPUTS, Left(self.u_out, self.s_out))


class Tucker(Form):
    """Decompose weights into 1×1, the kernel between a and b channels, 1×1."""

    bases = HOSVD

    def decompose(self, weights: Mapping[str, Tensor]) -> dict[str, HOSVD]:
        """Return both unfoldings' bases of every weight."""
        inputs, outputs = (
            left_svd({name: _unfolded(weight, axis) for name, weight in weights.items()})
            for axis in (_INPUTS, _OUTPUTS)
        )
        return {name: HOSVD(*inputs[name], *outputs[name]) for name in weights}

    def project(self, weight: Tensor, kept: Any) -> HOSVD:
        """Return both unfoldings along the vectors kept."""
        inputs, outputs = (project_left(_unfolded(weight, axis), left) for axis, left in kept.sides)
        return HOSVD(*inputs, *outputs)

    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the vectors and values of both unfoldings."""
        (outputs, inputs), (in_rank, out_rank) = chain.shape[:2], chain.full_ranks
        return {"u_in": (inputs, inputs), "s_in": (in_rank,), "u_out": (outputs, outputs), "s_out": (out_rank,)}

    def influences(self, gradient: Tensor, weight: Tensor, bases: Any) -> tuple[Tensor, ...]:
        """Return |σ_i · ∂L/∂σ_i|, which is u_iᵀ G Mᵀ u_i for an unfolding M, because M v_i = σ_i u_i."""
        found = []
        for axis, (u, s) in bases.sides:
            g_along, w_along = (u[:, : len(s)].mT @ _unfolded(each, axis).to(s.dtype) for each in (gradient, weight))
            found.append((g_along * w_along).sum(dim=1).abs())
        return tuple(found)

    def weights(self, weight: Tensor, bases: Any, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return U_aᵀ, the core and U_b at full rank."""
        u_IA, u_OB = bases.u_in[:, orders[0]], bases.u_out[:, orders[1]]
        return self._stages_of(u_IA, _core(weight.to(u_IA.dtype), u_IA, u_OB), u_OB)

    def truncate(self, weight: Tensor, bases: Any, ranks: Sequence[int], added_gap: float = 0.0) -> tuple[Tensor, ...]:
        """Return U_aᵀ, the core and U_b, differentiable in W.

        Bases with σ = 0 (to rounding) are left out, as by `svd.truncate`. W̃ depends on W and on the two projections:
        with G = ∂L/∂W̃ and M, Y the unfoldings of W and of W ×_O P_b by inputs, ∂L/∂P_a = G Yᵀ, of which

            u_kᵀ (G Yᵀ) u_i  is row k of Uᵀ ∂L/∂U_a          (i kept, k dropped)
            u_iᵀ (G Yᵀ) u_k  = Σ (∂L/∂C)_i · (M ×_O U_bᵀ)ᵀ u_k ,

        and the same for the outputs: the gradients of the three stages are all of G that is needed.
        """
        a, b = (max(1, min(rank, numerical_rank(s))) for rank, s in zip(ranks, bases.spectra, strict=True))
        u_IA, u_OB, dtype = bases.u_in[:, :a], bases.u_out[:, :b], bases.u_in.dtype
        w_OIK = weight.detach().to(dtype)

        def gradient(grad_IA: Tensor, grad_BAK: Tensor, grad_OB: Tensor) -> Tensor:
            g_BAK = grad_BAK.to(dtype)
            grad_w_OIK = _multiplied(_multiplied(g_BAK, u_IA, _INPUTS), u_OB, _OUTPUTS)
            cut = _multiplied(w_OIK, u_OB.mT, _OUTPUTS), _multiplied(w_OIK, u_IA.mT, _INPUTS)
            for (axis, left), reduced, grad_u in zip(bases.sides, cut, (grad_IA, grad_OB), strict=True):
                dropped = left.u[:, grad_u.shape[1] :]
                if dropped.shape[1]:  # else P = 1, whatever W is
                    along = _unfolded(g_BAK, axis) @ _unfolded(reduced, axis).mT + grad_u.to(dtype).mT
                    z = projection_gradient(left, along @ dropped, added_gap)
                    grad_w_OIK = grad_w_OIK + _multiplied(w_OIK, z, axis)
            return grad_w_OIK

        factors = u_IA.clone(), _core(w_OIK, u_IA, u_OB), u_OB.clone()
        return self._stages_of(*CutFrom.apply(weight, factors, gradient))

    def _stages_of(self, u_IA: Tensor, core_BAK: Tensor, u_OB: Tensor) -> tuple[Tensor, ...]:
        ones = (1,) * (core_BAK.dim() - 2)
        return u_IA.mT.reshape(*u_IA.mT.shape, *ones), core_BAK, u_OB.reshape(*u_OB.shape, *ones)


def _unfolded(w_OIK: Tensor, axis: int) -> Tensor:
    """Return the matrix whose rows are the slices along one axis: 0 for output, 1 for input channels."""
    return w_OIK.transpose(0, axis).flatten(1)


def _multiplied(w_OIK: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """Return W ×_axis matrix: every fibre along that axis multiplied with the matrix from the left."""
    others = w_OIK.transpose(0, axis)
    return (matrix @ others.flatten(1)).reshape(len(matrix), *others.shape[1:]).transpose(0, axis)


def _core(w_OIK: Tensor, u_IA: Tensor, u_OB: Tensor) -> Tensor:
    """Return W ×_I U_aᵀ ×_O U_bᵀ."""
    return _multiplied(_multiplied(w_OIK, u_IA.mT, _INPUTS), u_OB.mT, _OUTPUTS)


def _takes_kernel(shape: Shape) -> bool:
    return max(shape[2:], default=1) > 1


_SPATIAL = MatrixForm(
    "spatial", "sp", lambda shape: len(shape) == 4 and _takes_kernel(shape), lambda axes: ((False, True), (True, False))
)
_CHANNEL = MatrixForm("channel", "ch", lambda shape: True, lambda axes: ((True,) * axes, (False,) * axes))
_POINTWISE = MatrixForm("pointwise", "pw", lambda shape: True, lambda axes: ((False,) * axes, (True,) * axes))
_TUCKER = Tucker("tucker", "tk", _takes_kernel, lambda axes: ((False,) * axes, (True,) * axes, (False,) * axes))

FORMS: Mapping[str, MatrixForm | Tucker] = {form.name: form for form in (_SPATIAL, _CHANNEL, _TUCKER)}
"""Those that can be asked for."""

TAKEN: Mapping[str, MatrixForm | Tucker] = {**FORMS, _POINTWISE.name: _POINTWISE}
"""Those that a layer can have."""

MATRIX_FORMS = tuple(name for name, form in FORMS.items() if isinstance(form, MatrixForm))
"""Those with one cut, whose weights are a matrix."""

DEFAULT = "spatial"

Decomposition = SVD | HOSVD
"""What one weight was decomposed into."""

FormOf = str | Mapping[str, str]
"""A form for all layers, or one by name pattern, of which the first that matches a layer counts. As text, the latter is
"layer4.*:tucker,*:spatial".
"""


def check_form(form: FormOf, allowed: Sequence[str] = tuple(FORMS)) -> FormOf:
    """Return `form` if it is one of the allowed, or says only such by name pattern, as a mapping; else raise.

    >>> check_form("layer4.*:tucker,*:spatial")
    {'layer4.*': 'tucker', '*': 'spatial'}
    """
    if isinstance(form, str) and ":" in form:
        parts = (part.rpartition(":") for part in form.split(","))
        form = {pattern.strip(): one.strip() for pattern, _, one in parts}
    for pattern, one in form.items() if isinstance(form, Mapping) else [("*", form)]:
        if not isinstance(pattern, str) or not isinstance(one, str) or one not in allowed:
            names, came = ", ".join(map(repr, sorted(allowed))), f"{one!r:.80}"
            text = f"form[{pattern!r:.80}]={came}" if isinstance(form, Mapping) else f"form={came} is not known"
            raise InvalidArgumentError.about("form", one, names, f"{text}; allowed: {names}")
    return form


def short_form(form: FormOf) -> str:
    """Return what curves call a form.

    >>> short_form("spatial"), short_form("layer4.*:tucker,*:spatial")
    ('sp', 'tk+sp')
    """
    checked = check_form(form)
    names = (checked,) if isinstance(checked, str) else checked.values()
    return "+".join(dict.fromkeys(FORMS[name].short for name in names))


def is_form(form: FormOf) -> bool:
    """Return whether `check_form` takes it."""
    try:
        return bool(check_form(form))
    except InvalidArgumentError:
        return False


def check_matrix_form(form: FormOf, asker: str) -> FormOf:
    """Check a form for what is about a layer's matrix, and about forms with one cut only."""
    try:
        return check_form(form, MATRIX_FORMS)
    except InvalidArgumentError as error:
        raise InvalidArgumentError.about("form", error.came, str(error.allowed), f"{asker}: {error}") from None


def form_named(form: FormOf, name: str) -> str:
    """Return the form for a layer of this name; of patterns the first one that matches, else the default."""
    if isinstance(form, str):
        return form
    return next((one for pattern, one in form.items() if fnmatchcase(name, pattern)), DEFAULT)


def check_patterns(form: FormOf, names: Sequence[str]) -> None:
    """Refuse a pattern that matches none of the layers: it is a typo."""
    for pattern in () if isinstance(form, str) else form:
        if not any(fnmatchcase(name, pattern) for name in names):
            why = f"the pattern {pattern!r:.80} matches none of the {len(names)} layers"
            raise InvalidArgumentError.about("form", pattern, "a pattern that matches a layer", why=why)


def form_for(shape: Shape, form: str, *, transposed: bool = False) -> str:
    """Return the form a weight of this shape takes: 1×1 kernels and linear layers have nothing spatial to split.

    >>> form_for((8, 4, 1, 1), "spatial"), form_for((8, 4, 3, 3), "spatial")
    ('channel', 'spatial')
    >>> form_for((8, 4, 3, 3), "spatial", transposed=True)
    'pointwise'
    """
    taken = form if FORMS[form].takes(shape) else _CHANNEL.name
    return _POINTWISE.name if transposed and taken in MATRIX_FORMS else taken


def matrix_form(form: str) -> MatrixForm:
    """Return a form with one cut."""
    found = TAKEN[form]
    assert isinstance(found, MatrixForm), f"{form} has no matrix"
    return found


def matrix_shape(shape: Shape, form: str) -> tuple[int, int]:
    """Return (M, N) of a weight of this shape, without making the matrix."""
    return matrix_form(form).matrix_shape(shape)


def to_matrix(w_OIHW: Tensor, form: str) -> Tensor:
    """Return the matrix W of the paper, so that y = Wᵀx."""
    return matrix_form(form).to_matrix(w_OIHW)


def to_weight(w_MN: Tensor, shape: Shape, form: str) -> Tensor:
    """Return the weight of the given shape: the inverse of `to_matrix`."""
    return matrix_form(form).to_weight(w_MN, shape)


def to_factors(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors P (M × R) and Q (R × N) that two weights stand for: the inverse of `stages_of`."""
    rank = first.shape[0]
    return first.reshape(rank, -1).mT, second.transpose(0, 1).reshape(rank, -1)
