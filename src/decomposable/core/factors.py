"""The factors of every layer at full rank, in the order in which a size takes its bases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.core.criteria import Criterion, score
from decomposable.core.forms import first_weight, second_weight
from decomposable.core.layers import Layer
from decomposable.core.svd import SVD
from decomposable.core.taylor import Taylor


@dataclass(frozen=True, eq=False)
class Factors:
    """A layer's two weights at full rank, best basis first. √σ is on both sides, which keeps them of one scale."""

    first: Tensor
    second: Tensor


def factors_in_order(
    base: nn.Module, layers: Sequence[Layer], decompositions: Mapping[str, SVD], criterion: Criterion | Taylor
) -> tuple[dict[str, Factors], dict[str, np.ndarray]]:
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
        p_MK, q_KN = u_MK[:, index] * root_K, root_K[:, None] * v_NK[:, index].mT
        weight, dtype = layer.weight, layer.weight.dtype
        format_ = memory_format_of(weight)
        factors[layer.name] = Factors(
            first_weight(p_MK, layer.shape, layer.form).to(dtype).contiguous(memory_format=format_),
            second_weight(q_KN, layer.shape, layer.form).to(dtype).contiguous(memory_format=format_),
        )
    return factors, ordered_scores


def memory_format_of(weight: Tensor) -> torch.memory_format:
    """Channels last where the weight is laid out so and in no other way."""
    is_channels_last = weight.dim() == 4 and not weight.is_contiguous()
    is_channels_last = is_channels_last and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format
