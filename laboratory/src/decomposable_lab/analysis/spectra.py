"""Singular values, and the ranks that criteria select by them (figures 2d and 2e)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decomposable.core.forms import to_matrix
from decomposable.core.layers import FilterFn
from decomposable.core.svd import svd
from decomposable.network.decompose import decompose
from decomposable_edge.sizing.plans import RankPlan
from decomposable_lab.analysis.watching import layers_of


@torch.no_grad()
def singular_values(
    model: nn.Module, *, form: str = "spatial", filter_fn: FilterFn | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return σ of every layer's matrix, the largest first.

    >>> {name: values.shape for name, values in singular_values(nn.Sequential(nn.Linear(4, 3))).items()}
    {'0': (3,)}
    """
    layers = layers_of(model, form, filter_fn)
    found = svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in layers})
    return {name: each.s.double().cpu().numpy() for name, each in found.items()}


def selected_ranks(
    model: nn.Module,
    example_input: Any,
    *,
    criteria: Sequence[str] = ("uniform", "energy", "singular_value"),
    form: str = "spatial",
    filter_fn: FilterFn | None = None,
    **size: Any,
) -> Mapping[str, RankPlan]:
    """Return the plan that each criterion selects for one size, such as ``macs=0.25`` or ``ratio=0.3``.

    >>> plans = selected_ranks(nn.Sequential(nn.Linear(8, 8)), torch.zeros(1, 8), criteria=["energy"], macs=0.5)
    >>> plans["energy"].ranks
    {'0': 2}
    """
    nets = {c: decompose(model, example_input, form=form, criterion=c, filter_fn=filter_fn) for c in criteria}
    return {criterion: net.plan(**size) for criterion, net in nets.items()}
