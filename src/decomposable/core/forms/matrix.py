"""Forms with one cut: the weight becomes a matrix, the matrix two factors, and these the weights of two layers.

A convolution's weight has two axes for its channels and one for each axis of the kernel. A matrix has two axes, so the
weight's are split into rows and columns. Section 2 of the paper leaves the split open; its experiments (section 4) have

=========  ==========================  =============================  ===========================
form       matrix W (M × N)            first factor, U                second factor, S·Vᵀ
=========  ==========================  =============================  ===========================
channel    (I·H·W) × O                 H×W convolution, I → R         1×1 convolution, R → O
spatial    (I·W) × (O·H)               1×W convolution, I → R         H×1 convolution, R → O
pointwise  I × (O·H·W)                 1×1 convolution, I → R         H×W transposed, R → O
=========  ==========================  =============================  ===========================

In general, rows are the inputs with the axes of the first stage, columns the outputs with those of the second. A linear
layer is the channel form without a kernel.

The pointwise form is the channel form of a transposed convolution. That multiplies every position of its input with all
of its kernel, and its output has more positions than its input, so the 1×1 layer is cheapest before it.

Shape suffixes: O, I output and input channels; H, W kernel height and width; M, N rows and columns of the matrix;
R bases (the rank); K all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decomposable.core.svd import SVD, project, svd, truncate
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
    """Decompose weights as matrices: which axes of the kernel go with the rows is all that differs between forms."""

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
        """Return W = U S Vᵀ of every weight, in few calls; NaN and infinity raise `NonFiniteError` with the name."""
        return svd({name: self.to_matrix(weight) for name, weight in weights.items()})

    def project(self, weight: Tensor, kept: Any) -> SVD:
        """Return the weight along bases that were kept from an earlier one, sorted by their singular values again."""
        return project(self.to_matrix(weight), kept)

    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a decomposition's tensors, by name."""
        (rows, columns), rank = self.matrix_shape(chain.shape), chain.full_ranks[0]
        return {"u": (rows, rank), "s": (rank,), "v": (columns, rank)}

    def restored(self, tensors: Mapping[str, Any]) -> SVD:
        """Return the decomposition that has these tensors."""
        return SVD(tensors["u"], tensors["s"], tensors["v"])

    def matrices(self, chain: Chain) -> tuple[tuple[int, int], ...]:
        """Return the shapes of the matrices that are decomposed: what that costs follows from them."""
        return (self.matrix_shape(chain.shape),)

    def influences(self, gradient: Tensor, weight: Tensor, decomposition: Any) -> tuple[Tensor, ...]:
        """Return |σ_i · ∂L/∂σ_i| of every cut's bases, to first order what the loss changes by where a basis goes.

        Here ∂L/∂σ_i = u_iᵀ (∂L/∂W) v_i.
        """
        u_MK, s_K, v_NK = decomposition
        g_MN = self.to_matrix(gradient).to(s_K.dtype)
        return (s_K * ((u_MK.mT @ g_MN) * v_NK.mT).sum(dim=1).abs(),)

    def weights(self, weight: Tensor, decomposition: Any, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the weights of all stages at full rank, every cut's bases in the order given.

        They are U √S and √S Vᵀ: √σ is on both sides, which keeps them of one scale.
        """
        u_MK, s_K, v_NK = decomposition
        (order,) = orders
        root_K = s_K[order].sqrt()
        return self.stages_of(u_MK[:, order] * root_K, root_K[:, None] * v_NK[:, order].mT, weight.shape)

    def truncate(
        self, weight: Tensor, decomposition: Any, ranks: Sequence[int], added_gap: float = 0.0
    ) -> tuple[Tensor, ...]:
        """Return the weights of all stages at these ranks, differentiable in the weight that was decomposed.

        They are P = U_r and Q = S_r V_rᵀ, with the gradient of appendix A.
        """
        return self.stages_of(*truncate(self.to_matrix(weight), decomposition, ranks[0], added_gap), weight.shape)
