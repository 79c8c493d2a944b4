"""What a decomposed network consists of, apart from its modules; and the tensors of each of its sizes.

`decompose` makes a `NetworkState`; a file holds it with everything else that the modules hold (`file/contents.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from decomposable.core.factors import Factors, as_held, memory_format_of
from decomposable.core.standin import product
from decomposable.network.calibration.statistics import InTorch, Statistics
from decomposable.network.calls import CallSignature, InputSpec
from decomposable_edge.device_graph import DeviceGraph
from decomposable_edge.sizing.chain import Chain, Ranks
from decomposable_edge.sizing.interpolation import TunedSizes
from decomposable_edge.sizing.latency import LatencyProfile, choose_timed
from decomposable_edge.sizing.plans import RankPlan, SizeRequest
from decomposable_edge.sizing.ranks import RankSelector

P = TypeVar("P", bound="NetworkState")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(InTorch, TunedSizes):
    """Vectors of their own that sizes have (scales, shifts and biases), in PyTorch, named as the original's parameters.

    `tuning.py` trains them. Between tuned sizes they are interpolated as statistics are: those of a normalisation layer
    by the rank of the layer that feeds it, a bias by the rank of its own layer, all others by the size as a whole.
    """

    values_ST: Tensor

    @property
    def original_vectors(self) -> dict[str, Tensor]:
        """Return the vectors of the original network."""
        return dict(zip(self.names, self.original[0].split(self.channels), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkState:
    """The factors of every layer, and all that choosing and setting a size depends on.

    Attributes:
        plan: the current size.
        layer_before_norm: for every normalisation layer that a decomposed layer feeds, the latter's name.
        skipped: the layers left alone, each with the reason.
        not_counted: modules with weights of their own that no MAC formula counts, with their type.
        call: how it is called and what it takes, where an example input has told.
        unclear: why an export cannot know what it takes, where that is so.
        info: what else its maker wanted to be stored with it, as JSON knows it.
        graph: how it is wired, for devices: what a file that it was saved to, or loaded from, holds of that.
    """

    factors: Mapping[str, Factors]
    selector: RankSelector
    plan: RankPlan
    statistics: Statistics | None = None
    tuned: Tuned | None = None
    layer_before_norm: Mapping[str, str]
    skipped: Mapping[str, str]
    not_counted: Mapping[str, str]
    call: CallSignature | None = None
    unclear: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    graph: DeviceGraph | None = None

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """Return the inputs by name; none if there was no example input."""
        return {} if self.call is None else self.call.inputs

    @property
    def input(self) -> InputSpec | None:
        """Return the input, if there is only one."""
        return next(iter(self.inputs.values())) if len(self.inputs) == 1 else None

    def plan_for(
        self, request: SizeRequest, profile: Callable[[], LatencyProfile | None], runtime: str = "torch"
    ) -> RankPlan:
        """Return the plan for a request, by the times that were measured here in a runtime where it asks for those."""
        threads, calibrated = torch.get_num_threads(), self.statistics
        return choose_timed(self.selector, profile, request, calibrated=calibrated, runtime=runtime, threads=threads)

    def map(self: P, function: Callable[[Tensor], Tensor]) -> P:
        """Return the same with `function` applied to the tensors, such as a move to another device."""
        known = {"statistics": self.statistics, "tuned": self.tuned}
        changed: dict[str, Any] = {name: each and each.map(function) for name, each in known.items()}
        return replace(self, factors=mapped(function, self.factors), **changed)

    def alone(self) -> NetworkState:
        """Return these, without what a file holds besides."""
        return NetworkState(**{each.name: getattr(self, each.name) for each in fields(NetworkState)})


def sliced(factors: Factors, ranks: Ranks) -> Factors:
    """Return the first bases of every cut: rows of the stage before it, columns of the one behind it.

    The first stage is a view. The others of a convolution are copied: every forward pass would make them contiguous.
    """
    found = [factors[0][: ranks[0]]]
    for whole, before, behind in zip(factors[1:], ranks, (*ranks[1:], None), strict=True):
        part = whole[:behind, :before]
        found.append(part.contiguous(memory_format=memory_format_of(whole)) if part.dim() > 2 else part)
    return tuple(found)


def mapped(function: Callable[[Tensor], Tensor], factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Return the factors with a function applied to each tensor."""
    return {name: tuple(map(function, each)) for name, each in factors.items()}


@dataclass(frozen=True, eq=False)
class LayerBases:
    """The weight of one layer, as it holds it, and its factors: `realising.Bases` in PyTorch."""

    chain: Chain
    whole: Factors
    own: Tensor

    @property
    def kept(self) -> Ranks:
        """Return how many bases of every cut there are."""
        return tuple(map(len, self.whole[:-1]))

    def weight(self) -> Tensor:
        """Return the dense weight."""
        return self.own.detach()

    def first(self, ranks: Ranks) -> Factors:
        """Return the weights of the stages with so many bases."""
        return sliced(self.whole, ranks)

    def beyond(self, rank: int) -> Factors:
        """Return the weights of two stages with all bases but so many."""
        first, second = self.whole
        return first[rank:], second[:, rank:]

    def joined(self, factors: Factors) -> Tensor:
        """Return the dense weight that stages stand for, laid out as this layer's is."""
        made = product(factors, swapped=self.chain.transposed)
        return made.contiguous(memory_format=memory_format_of(self.own))

    def held(self, factors: Factors) -> Factors:
        """Return the weights of stages as their layers hold them."""
        return as_held(self.chain, factors)
