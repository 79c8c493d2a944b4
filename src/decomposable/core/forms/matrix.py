"""Forms with one cut: the weight becomes a matrix, the matrix two factors, and these the weights of two layers.

A convolution's weight has two axes for its channels and one for each axis of the kernel, a matrix has two, so they have
to be split into rows and columns. Section 2 of the paper leaves the split open; its experiments (section 4) have

=========  ==========================  =============================  ===========================
form       matrix W (M × N)            first factor, U                second factor, S·Vᵀ
=========  ==========================  =============================  ===========================
channel    (I·H·W) × O                 H×W convolution, I → R         1×1 convolution, R → O
spatial    (I·W) × (O·H)               1×W convolution, I → R         H×1 convolution, R → O
=========  ==========================  =============================  ===========================

In general, rows are the inputs with the axes of the first stage, columns the outputs with those of the second. A linear
layer is the channel form without a kernel.

Shape suffixes: O, I output and input channels; H, W kernel height and width; M, N rows and columns of the matrix;
R bases (the rank); K all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from decomposable.core.forms.base import Decomposition, Form
from decomposable.core.svd import SVD, project, svd, truncate
from decomposable_edge.sizing.chain import Chain


class MatrixForm(Form):
    """A form whose chain has one cut: which axes of the kernel go with the rows is all that differs."""

    def _axes(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """The weight's axes that make up the rows, and the columns."""
        first, second = self.stages(len(shape) - 2)
        return [1, *(2 + i for i, own in enumerate(first) if own)], [0, *(2 + i for i, own in enumerate(second) if own)]

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """(M, N) of a weight of this shape, without making the matrix."""
        rows, columns = (math.prod(shape[axis] for axis in axes) for axes in self._axes(shape))
        return rows, columns

    def to_matrix(self, w_OIHW: Tensor) -> Tensor:
        """Weight → matrix W of the paper, so that y = Wᵀx. Exact: only the axes move."""
        rows, columns = self._axes(w_OIHW.shape)
        return w_OIHW.permute(*rows, *columns).reshape(self.matrix_shape(w_OIHW.shape))

    def to_weight(self, w_MN: Tensor, shape: Sequence[int]) -> Tensor:
        """Matrix → weight of the given shape: the inverse of `to_matrix`."""
        rows, columns = self._axes(shape)
        order = [*rows, *columns]
        apart = w_MN.reshape([shape[axis] for axis in order])
        return apart.permute([order.index(axis) for axis in range(len(order))])

    def first_weight(self, p_MR: Tensor, shape: Sequence[int]) -> Tensor:
        """The weight of the first of the two layers, input → R bases, from the left factor."""
        rank = p_MR.shape[1]
        return p_MR.mT.reshape(rank, shape[1], *self.chain(shape).kernels[0])

    def second_weight(self, q_RN: Tensor, shape: Sequence[int]) -> Tensor:
        """The weight of the second of the two layers, R bases → output, from the right factor."""
        rank = q_RN.shape[0]
        return q_RN.reshape(rank, shape[0], *self.chain(shape).kernels[1]).transpose(0, 1)

    def to_factors(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """The factors P (M × R) and Q (R × N) that two weights stand for: the inverse of the two functions above."""
        rank = first.shape[0]
        return first.reshape(rank, -1).mT, second.transpose(0, 1).reshape(rank, -1)

    def stages_of(self, p_MR: Tensor, q_RN: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Both weights for W̃ = P Q."""
        return self.first_weight(p_MR, shape), self.second_weight(q_RN, shape)

    def decompose(self, weights: Mapping[str, Tensor]) -> dict[str, Decomposition]:
        """W = U S Vᵀ of every matrix."""
        return {**svd({name: self.to_matrix(weight) for name, weight in weights.items()})}

    def project(self, weight: Tensor, kept: SVD) -> SVD:
        """W along the bases that span all of its smaller side."""
        return project(self.to_matrix(weight), kept)

    def tensors(self, chain: Chain) -> dict[str, tuple[int, ...]]:
        """U, S and V."""
        (rows, columns), rank = self.matrix_shape(chain.shape), chain.full_ranks[0]
        return {"u": (rows, rank), "s": (rank,), "v": (columns, rank)}

    def matrices(self, chain: Chain) -> tuple[tuple[int, int], ...]:
        """W."""
        return (self.matrix_shape(chain.shape),)

    def restored(self, chain: Chain, tensors: Mapping[str, Any]) -> SVD | None:
        """U, S and V."""
        shapes = self.tensors(chain)
        return SVD(**{key: tensors[key] for key in shapes}) if are_of(tensors, shapes) else None

    def influences(self, gradient: Tensor, weight: Tensor, decomposition: SVD) -> tuple[Tensor, ...]:
        """∂L/∂σ_i = u_iᵀ (∂L/∂W) v_i."""
        u_MK, s_K, v_NK = decomposition
        g_MN = self.to_matrix(gradient).to(s_K.dtype)
        return (s_K * ((u_MK.mT @ g_MN) * v_NK.mT).sum(dim=1).abs(),)

    def weights(self, weight: Tensor, decomposition: SVD, orders: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """U √S and √S Vᵀ: √σ is on both sides, which keeps them of one scale."""
        u_MK, s_K, v_NK = decomposition
        (order,) = orders
        root_K = s_K[order].sqrt()
        return self.stages_of(u_MK[:, order] * root_K, root_K[:, None] * v_NK[:, order].mT, weight.shape)

    def truncate(
        self, weight: Tensor, decomposition: SVD, ranks: Sequence[int], added_gap: float = 0.0
    ) -> tuple[Tensor, ...]:
        """P = U_r and Q = S_r V_rᵀ, with the gradient of appendix A."""
        return self.stages_of(*truncate(self.to_matrix(weight), decomposition, ranks[0], added_gap), weight.shape)


def are_of(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether there are tensors of numbers by these names, of these shapes."""
    return all(
        isinstance(tensors.get(key), Tensor) and tensors[key].is_floating_point() and tuple(tensors[key].shape) == shape
        for key, shape in shapes.items()
    )
