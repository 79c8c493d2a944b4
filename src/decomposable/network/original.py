"""The model that was decomposed, and the networks of other sizes that are made around its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decomposable.core.factors import Factors, as_held
from decomposable.core.layers import ChainLayers, Layer, avoid_fast_paths_
from decomposable.core.tree import clone_buffers_, put_parameters_, rewire
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.network.parts import LayerBases, NetworkState
from decomposable.network.tuned import feeder_of, vectors_of
from decomposable_edge.realising import realised, statistics_at


class Original:
    """The model itself, of which every size shares what is not decomposed.

    Attributes:
        base: the model; its parameters are not trainable any more.
        trainable: which of them were.
        norms: the names of its batch normalisation layers.
    """

    def __init__(self, base: nn.Module, layers: tuple[Layer, ...]) -> None:
        self.trainable = {name: p.requires_grad for name, p in base.named_parameters(remove_duplicate=False)}
        self.base, self.layers = base.requires_grad_(False), layers
        self.norms = tuple(tracked_batch_norms(base))
        self._chains = {module: ChainLayers(module, layer.chain) for layer in layers for module in layer.modules}

    def at_size(self, parts: NetworkState) -> nn.Module:
        """The network of the current size, with the statistics that were calibrated for it."""
        module = self.uncalibrated(parts)
        for key, values in statistics_at(parts.plan, parts.statistics).items():
            name, _, kind = key.rpartition(".")
            module.get_submodule(name)._buffers[kind] = values.clone()
        return module

    @torch.inference_mode(False)  # a size made in that mode could not be used outside it
    @torch.no_grad()
    def uncalibrated(self, parts: NetworkState) -> nn.Module:
        """The same with the original's statistics: slices of the factors, or W̃ as one weight, in each layer's place.

        Vectors are those that were tuned for the size, or else the original's.
        """
        bases = {
            layer.name: LayerBases(layer.chain, parts.factors[layer.name], layer.chain.held_dense(layer.weight))
            for layer in self.layers
        }
        size = realised(parts.plan, bases, None, parts.tuned)
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            found = size.layers[layer.name]
            weights = [nn.Parameter(weight, requires_grad=False) for weight in found.weights]
            if found.runs_as == "factors":
                replacements |= {module: self._chains[module].build(*weights) for module in layer.modules}
            elif found.runs_as == "dense":
                replacements |= {module: _with_weight(module, weights[0]) for module in layer.modules}
        network = self._rewired(replacements)
        for name in self.norms:
            clone_buffers_(network.get_submodule(name))  # a pass in training mode writes to them
        own = {name: self.base.get_parameter(name) for name in size.tuned}
        put_parameters_(network, {own[name]: _like(own[name], values) for name, values in size.tuned.items()})
        return network

    def vectors(self, layer_before_norm: Mapping[str, str]) -> tuple[dict[str, nn.Parameter], dict[str, str | None]]:
        """The model's parameters that can be tuned, and for each the decomposed layer whose rank says where it lies.

        `layer_before_norm` are the layers that feed normalisation layers.
        """
        layer_of = {module: layer.name for layer in self.layers for module in layer.modules}
        paths = {path: layer_of[module] for path, module in self.base.named_modules() if module in layer_of}
        found = vectors_of(self.base)
        return found, {name: feeder_of(name, layer_before_norm, paths) for name in found}

    @torch.inference_mode(False)
    def put_vectors_(self, values: Mapping[str, Tensor]) -> None:
        """Give the model these vectors, each laid end to end; what another thread runs keeps those it has."""
        own = {name: self.base.get_parameter(name) for name in values}
        put_parameters_(self.base, {own[name]: _like(own[name], each) for name, each in values.items()})

    def in_factors(self, factors: Mapping[str, Factors]) -> nn.Module:
        """The network with these factors in place of every decomposed layer."""
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            replacements |= self._in_factors(layer, factors[layer.name])
        return self._rewired(replacements)

    def with_trainable(self, module: nn.Module) -> nn.Module:
        """The network of a size, its parameters as trainable as the original's were."""
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trainable[name if name in self.trainable else _before(name)])
        return module

    def _in_factors(self, layer: Layer, factors: Factors) -> dict[nn.Module, nn.Module]:
        weights = [nn.Parameter(weight, requires_grad=False) for weight in as_held(layer.chain, factors)]
        return {module: self._chains[module].build(*weights) for module in layer.modules}

    def _rewired(self, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
        network = rewire(self.base, replacements)
        avoid_fast_paths_(network)
        return network


def _with_weight(module: nn.Module, weight: nn.Parameter) -> nn.Module:
    """The same layer with another weight."""
    twin = rewire(module, {})
    twin._parameters["weight"] = weight
    return twin


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Values laid end to end as a parameter of that shape and type; it is not trained."""
    return nn.Parameter(values.view(parameter.shape).to(parameter.dtype, copy=True), requires_grad=False)


def _before(name: str) -> str:
    """The original's name of a parameter of a chain: ``conv.1.bias`` → ``conv.bias``."""
    *path, _, kind = name.split(".")
    return ".".join([*path, kind])
