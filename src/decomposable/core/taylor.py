"""The first-order Taylor criterion: how much the loss would change if a basis went (section 2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.forms import to_matrix
from decomposable.core.layers import Layer
from decomposable.core.svd import SVD
from decomposable.core.undisturbed import evaluating
from decomposable.errors import InvalidArgumentError


@dataclass(frozen=True, eq=False)
class Taylor:
    """Score σ_i · |∂L/∂σ_i|, averaged over a few batches, with ∂L/∂σ_i = u_iᵀ (∂L/∂W) v_i of the full network.

    Pass it as the criterion: ``decompose(model, criterion=Taylor(loader, loss))`` where ``loss(net, batch)`` returns
    a scalar. The magnitude is taken batch by batch: over all data the gradient of a trained network is near zero.
    """

    batches: Iterable[Any] = field(repr=False)
    loss: Callable[[nn.Module, Any], Tensor]
    max_batches: int = 8

    def scores(
        self, model: nn.Module, layers: Sequence[Layer], decompositions: Mapping[str, SVD]
    ) -> dict[str, NDArray[np.float64]]:
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
                        g_MN = to_matrix(gradient, layer.form)
                        totals[layer.name] += taylor_scores(decompositions[layer.name], g_MN)
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


def taylor_scores(decomposition: SVD, g_MN: Tensor) -> Tensor:
    """σ_i · |u_iᵀ G v_i| for every basis.

    >>> decomposition = SVD(torch.eye(2), torch.tensor([2.0, 1.0]), torch.eye(2))
    >>> taylor_scores(decomposition, torch.tensor([[-1.0, 9.0], [9.0, 5.0]]))
    tensor([2., 5.])
    """
    u_MK, s_K, v_NK = decomposition
    return s_K * ((u_MK.mT @ g_MN.to(s_K.dtype)) * v_NK.mT).sum(dim=1).abs()
