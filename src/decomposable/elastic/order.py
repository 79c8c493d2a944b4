"""The order of the bases by data, found once while a network is trained: what a cut of each layer costs then."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposable.core.criteria import Scores, ScoresByLayer
from decomposable.core.layers import Layer
from decomposable.core.moments import NoGradientError
from decomposable.core.networks import warn_the_caller
from decomposable.core.processes import Processes
from decomposable.core.tracing import first_entry
from decomposable.elastic.options import BY_DATA
from decomposable.network.decompose import decompose
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.errors import InvalidArgumentError

IMAGES = 250
"""So many, in whole batches, say it: for the order alone, more add little (docs/cut.md#how-many-images)."""

NEVER = 1e300
"""The score of a basis that is not to be cut off, above all that are measured."""

Call = dict[str | int, Any]
"""What a network was called with: arguments by place and by name."""


def call_again(net: nn.Module, call: Call) -> Any:
    """Call a network with what another was called with."""
    by_place = [value for key, value in call.items() if isinstance(key, int)]
    return net(*by_place, **{key: value for key, value in call.items() if isinstance(key, str)})


@contextmanager
def kept_calls(network: nn.Module, into: list[Call], steps_left: int) -> Iterator[None]:
    """Keep what the network is called with inside, where this step is one of the last that make up `IMAGES`."""

    def keep(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        call: Call = dict(enumerate(args))
        call.update(kwargs)
        inputs = first_entry(call)
        samples = len(inputs) if isinstance(inputs, Tensor) and inputs.dim() > 0 else 1
        if steps_left <= math.ceil(IMAGES / max(1, samples)):
            into.append(tree_map_only(Tensor, Tensor.detach, call))

    hook = network.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def scores_by_data(
    model: nn.Module, layers: Sequence[Layer], data: Iterable[Any], **options: Any
) -> dict[str, tuple[Scores, ...]] | None:
    """Return what every basis of the model as it is now is worth by data; what is not decomposed is never cut.

    The loss of the network says it where the network gives logits, else its output; where there are no gradients, every
    layer's output. None where data know nothing better than the weights.
    """
    by_data = partial(decompose, model, data=data, **options)
    with warnings.catch_warnings(), torch.autocast(layers[0].weight.device.type, enabled=False):
        warnings.filterwarnings("ignore", message="data: on ")  # who asks says it
        try:
            net: DecomposedNet = by_data()
        except NoGradientError:  # a part of the model runs without
            net = by_data(criterion="output")
    if net.cut_report is not None and net.cut_report.kept == "weights":
        return None
    never = {layer.name: tuple(np.full(rank, NEVER) for rank in layer.full_ranks) for layer in layers}
    return {**never, **{name: cuts for name, cuts in net.scores.items() if name in never}}


def settled(
    model: nn.Module, layers: Sequence[Layer], data: Iterable[Any], processes: Processes, **options: Any
) -> ScoresByLayer | None:
    """Return the order that the first process finds by its data; None, with a warning, where it finds none."""

    def find() -> tuple[dict[str, tuple[Scores, ...]] | None, str]:
        if not processes.is_first:
            return None, ""
        try:
            return scores_by_data(model, layers, data, **options), "it is no better on samples that were kept out"
        except InvalidArgumentError as error:
            return None, str(error)

    found, why = processes.together(find)
    ranks = [(layer.name, rank) for layer in layers for rank in layer.full_ranks]
    own = [np.zeros(rank) for _, rank in ranks] if found is None else [s for layer in layers for s in found[layer.name]]
    is_found, *values = processes.from_first([found is not None, *np.concatenate(own).tolist()])
    if not is_found:
        if processes.is_first:
            warn_the_caller(f"order={BY_DATA} is not taken, the weights say the order: {why}")
        return None
    sections = iter(np.split(np.array(values), np.cumsum([rank for _, rank in ranks])[:-1]))
    return {layer.name: tuple(next(sections) for _ in layer.full_ranks) for layer in layers}
