"""The factors of every layer at full rank, in the order in which a size takes its bases.

That order is by a score: of a criterion's, from the singular values alone, or of `Taylor`'s, which needs data (section
2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.core.criteria import Criterion, Scores, score
from decomposable.core.forms import first_weight, second_weight, to_matrix
from decomposable.core.layers import Layer
from decomposable.core.svd import SVD
from decomposable.core.tree import evaluating
from decomposable.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Taylor:
    """Score σ_i · |∂L/∂σ_i|, averaged over a few batches, with ∂L/∂σ_i = u_iᵀ (∂L/∂W) v_i of the full network.

    To first order that is how much the loss would change if a basis went. The magnitude is taken batch by batch: over
    all data the gradient of a trained network is near zero.

    Pass it as the criterion: ``decompose(model, criterion=Taylor(loader, loss))`` where ``loss(net, batch)`` returns a
    scalar.
    """

    batches: Iterable[Any] = field(repr=False)
    loss: Callable[[nn.Module, Any], Tensor]
    max_batches: int = 8

    def scores(self, model: nn.Module, layers: Sequence[Layer], decompositions: Mapping[str, SVD]) -> dict[str, Scores]:
        """The scores of every layer's bases, in the order of their singular values. The model is as before after."""
        frozen = [layer.weight for layer in layers if not layer.weight.requires_grad]
        totals = {layer.name: torch.zeros_like(decompositions[layer.name].s) for layer in layers}
        count = 0
        try:
            for weight in frozen:
                weight.requires_grad_(True)
            for batch in islice(self.batches, self.max_batches):
                with evaluating(model), torch.enable_grad():
                    loss = self.loss(model, batch)
                    gradients = torch.autograd.grad(loss, [layer.weight for layer in layers], allow_unused=True)
                for layer, gradient in zip(layers, gradients, strict=True):
                    if gradient is not None:
                        u_MK, s_K, v_NK = decompositions[layer.name]
                        g_MN = to_matrix(gradient, layer.form).to(s_K.dtype)
                        totals[layer.name] += s_K * ((u_MK.mT @ g_MN) * v_NK.mT).sum(dim=1).abs()
                count += 1
        finally:
            for weight in frozen:
                weight.requires_grad_(False)
        if count == 0:
            raise InvalidArgumentError("criterion=Taylor(...): its loader yielded no batch; allowed: at least one")
        for name, total in totals.items():
            if not torch.isfinite(total).all():
                raise InvalidArgumentError(
                    f"layer '{name}': criterion=Taylor(...) gave NaN or infinity; allowed: a loss with finite gradients"
                )
        return {name: (total / count).double().cpu().numpy() for name, total in totals.items()}


@dataclass(frozen=True, eq=False)
class Factors:
    """A layer's two weights at full rank, best basis first. √σ is on both sides, which keeps them of one scale."""

    first: Tensor
    second: Tensor


def factors_in_order(
    base: nn.Module, layers: Sequence[Layer], decompositions: Mapping[str, SVD], criterion: Criterion | Taylor
) -> tuple[dict[str, Factors], dict[str, Scores]]:
    """Every layer's factors and scores, sorted by score: the criterion may order bases otherwise than σ does."""
    if isinstance(criterion, Taylor):
        all_scores = criterion.scores(base, layers, decompositions)
    else:
        sigmas = {name: d.s.double().cpu().numpy() for name, d in decompositions.items()}
        all_scores = {name: score(criterion, name, sigma) for name, sigma in sigmas.items()}
    factors, ordered_scores = {}, {}
    for layer in layers:
        u_MK, s_K, v_NK = decompositions[layer.name]
        order = np.argsort(-all_scores[layer.name], kind="stable")
        ordered_scores[layer.name] = all_scores[layer.name][order]
        index = torch.from_numpy(order).to(s_K.device)
        root_K = s_K[index].sqrt()
        factors[layer.name] = factors_of(layer, u_MK[:, index] * root_K, root_K[:, None] * v_NK[:, index].mT)
    return factors, ordered_scores


def factors_of(layer: Layer, p_MK: Tensor, q_KN: Tensor) -> Factors:
    """W = P Q as the weights of two layers, of the type and in the memory format of the layer's own."""
    weights = first_weight(p_MK, layer.shape, layer.form), second_weight(q_KN, layer.shape, layer.form)
    kind, layout = layer.weight.dtype, memory_format_of(layer.weight)
    return Factors(*(weight.to(kind).contiguous(memory_format=layout) for weight in weights))


def memory_format_of(weight: Tensor) -> torch.memory_format:
    """Channels last where the weight is laid out so and in no other way."""
    is_other = weight.dim() == 4 and not weight.is_contiguous()
    is_channels_last = is_other and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format
