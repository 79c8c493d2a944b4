"""The factored network at given ranks, which is its only size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from decomposable.checks import is_integer
from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.methods.base import LineStyle, Material, Method, Training
from decomposable.methods.scratch.factored import (
    empty_factors,
    factored,
    fresh_factors,
    plain_copy,
    size_of,
    truncated_factors,
)
from decomposable.methods.scratch.settings import ScratchSettings
from decomposable.methods.settings import Settings
from decomposable.network.sized import Size, SizedNet


class Scratch(Method):
    """The factored network, trained normally."""

    name = "scratch"
    summary = "the factored network at given ranks, trained normally from scratch"
    label = "our ranks, trained from scratch"
    style = LineStyle(color="#56B4E9", marker="X", linestyle="none", markersize=10, zorder=8, place=7)
    settings = ScratchSettings

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """There must be ranks; how many, only the model tells."""
        if not settings.of(ScratchSettings).ranks:
            raise InvalidArgumentError(
                "ranks: none are given; allowed with method=scratch: the rank of every layer in order, such as "
                "plan.ranks of a trained network at one size; `decomposable compare` takes Decomposable-Net's"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """Two factors in place of every layer whose rank is not full: random ones, or from weights that were trained
        before the best of that rank.
        """
        self.check(settings, has_init=is_trained)
        ranks = settings.of(ScratchSettings).ranks
        return factored(model, ranks, settings.form, truncated_factors if is_trained else fresh_factors)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> SizedNet:
        """The trained network at its one size."""
        return SizedNet(
            method=self.name,
            network=network,
            sizes=[size_of(network, material.example_input)],
            build=partial(_build, network),  # a copy of the whole copies the network in it, too
            structure={
                "form": settings.form,
                "ranks": list(settings.of(ScratchSettings).ranks),
                "input_shape": list(material.example_input.shape[1:]),
            },
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Size], nn.Module]]:
        """The modules of a file; its ranks and form are those that count, whatever the settings say."""
        form, ranks = structure.get("form"), structure.get("ranks")
        if not isinstance(form, str) or not isinstance(ranks, list) or not all(map(is_integer, ranks)):
            raise ArtifactError(f"structure={dict(structure)!r:.80}; allowed: a form, and a list of ranks")
        network = factored(model, ranks, form, empty_factors)
        return network, partial(_build, network)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Size:
        """There is only one."""
        return size_of(network, example_input)

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """One for each size, at the ranks that Decomposable-Net has there."""
        sizes = settings.of(ScratchSettings).compare_ranks
        return tuple(Training(curve="scratch", folder=f"{size:.12g}", ranks=size) for size in sizes)


def _build(network: nn.Module, size: Size) -> nn.Module:
    return plain_copy(network)


METHOD = Scratch()
