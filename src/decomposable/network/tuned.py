"""Vectors of their own that sizes have: scales, shifts and biases, which `tuning.py` trains and a file holds.

They are interpolated between tuned sizes as statistics are (`sizing/interpolation.py`): those of a normalisation layer
by the rank of the layer that feeds it, the bias of a decomposed layer by its own rank, all others by the size as a
whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from decomposable.network.calibration.statistics import InTorch
from decomposable_edge.sizing.interpolation import TunedSizes


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned(InTorch, TunedSizes):
    """The vectors of tuned sizes, in PyTorch, named as the original's parameters."""

    values_ST: Tensor

    @property
    def original_vectors(self) -> dict[str, Tensor]:
        """Those that the original network has."""
        return dict(zip(self.names, self.original[0].split(self.channels), strict=True))


def vectors_of(base: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a network that can be tuned: those with one axis at most, each under its first name.

    Those that a module holds elsewhere, too, as an LSTM does, are left alone: what holds them would not change.
    """
    elsewhere = {
        id(entry)
        for module in base.modules()
        for held in vars(module).values()
        if isinstance(held, list | tuple)
        for entry in held
    }
    return {
        name: parameter
        for name, parameter in base.named_parameters()
        if parameter.dim() <= 1
        and parameter.numel()
        and parameter.is_floating_point()
        and id(parameter) not in elsewhere
    }


def feeder_of(name: str, layer_before_norm: Mapping[str, str], paths: Mapping[str, str]) -> str | None:
    """The decomposed layer whose rank says where a vector lies between two sizes; None where none does.

    `layer_before_norm` are the layers that feed normalisation layers, `paths` the places of decomposed layers.

    >>> feeder_of("norm.bias", {"norm": "conv"}, {"conv": "conv"}), feeder_of("conv.bias", {}, {"conv": "conv"})
    ('conv', 'conv')
    """
    path = name.rpartition(".")[0]
    return layer_before_norm.get(path, paths.get(path))
