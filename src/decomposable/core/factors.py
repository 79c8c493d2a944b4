"""The factors of every layer at full rank, in the order in which a size takes its bases.

That order is by a score: a criterion's, from the singular values alone, or `Taylor`'s, which needs data (section 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.core.criteria import Criterion, Scores, ScoresByLayer, scores_of
from decomposable.core.forms import Decomposition
from decomposable.core.gradients import requiring_grad
from decomposable.core.layers import Layer, in_order, laid_out
from decomposable.core.tree import evaluating
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Chain


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

    def scores(
        self, model: nn.Module, layers: Sequence[Layer], decompositions: Mapping[str, Decomposition]
    ) -> dict[str, tuple[Scores, ...]]:
        """Return the scores of every cut's bases, in the order of their singular values; the model stays as it is."""
        parameters = [layer.parameter for layer in layers]
        totals = {x.name: [torch.zeros_like(s) for s in decompositions[x.name].spectra] for x in layers}
        count = 0
        with requiring_grad(parameters, True), evaluating(model), torch.enable_grad():
            for batch in islice(self.batches, self.max_batches):
                gradients = torch.autograd.grad(self.loss(model, batch), parameters, allow_unused=True)
                for layer, gradient in zip(layers, gradients, strict=True):
                    if gradient is not None:
                        weight, bases = layer.weight.detach(), decompositions[layer.name]
                        found = layer.numerics.influences(layer.cut.of(gradient), weight, bases)
                        totals[layer.name] = [a + b for a, b in zip(totals[layer.name], found, strict=True)]
                count += 1
        if count == 0:
            raise InvalidArgumentError.about("criterion", 0, "at least one batch", why="Taylor's loader yielded none")
        scores = {n: tuple((t / count).double().cpu().numpy() for t in cuts) for n, cuts in totals.items()}
        for name, cuts in scores.items():
            if not all(np.isfinite(each).all() for each in cuts):
                why, allowed = "Taylor gave NaN or infinity", "a loss with finite gradients"
                raise InvalidArgumentError.about("criterion", None, allowed, why=why, layer=name)
        return scores


Factors = tuple[Tensor, ...]
"""The weights of a layer's stages at full rank, every cut's best basis first."""


def factors_in_order(
    base: nn.Module,
    layers: Sequence[Layer],
    decompositions: Mapping[str, Decomposition],
    criterion: Criterion | ScoresByLayer | Taylor,
) -> tuple[dict[str, Factors], dict[str, tuple[Scores, ...]]]:
    """Return every layer's factors and its cuts' scores, sorted by score: a criterion may order otherwise than σ."""
    taylor = criterion.scores(base, layers, decompositions) if isinstance(criterion, Taylor) else {}
    factors, ordered_scores = {}, {}
    for layer in layers:
        weight, bases = layer.weight.detach(), decompositions[layer.name]
        if isinstance(criterion, Taylor):
            cuts = taylor[layer.name]
        else:
            cuts = scores_of(criterion, layer.name, [s.double().cpu().numpy() for s in bases.spectra])
        orders = [np.argsort(-scores, kind="stable") for scores in cuts]
        ordered_scores[layer.name] = tuple(scores[order] for scores, order in zip(cuts, orders, strict=True))
        places = [torch.from_numpy(order).to(weight.device) for order in orders]
        factors[layer.name] = like_weight(layer, layer.numerics.weights(weight, bases, places))
    return factors, ordered_scores


def like_weight(layer: Layer, weights: Sequence[Tensor]) -> Factors:
    """Return the weights of a chain, of the type and in the memory format of the layer's own."""
    kind, layout = layer.weight.dtype, memory_format_of(layer.weight)
    return tuple(in_order(weight.to(kind)).contiguous(memory_format=layout) for weight in weights)


def as_held(chain: Chain, factors: Factors) -> Factors:
    """Return the weights of a chain as its layers hold them, in the memory format that they have here."""
    held = zip(chain.held(factors), factors, chain.swapped, strict=True)
    return tuple(laid_out(each, memory_format_of(own)) if is_swapped else each for each, own, is_swapped in held)


def memory_format_of(weight: Tensor) -> torch.memory_format:
    """Return channels last where the weight is laid out so and in no other way."""
    is_other = weight.dim() == 4 and not weight.is_contiguous()
    is_channels_last = is_other and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format
