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
from decomposable_edge.realising import realised, statistics_at


def chains_of(layer: Layer, held: Factors, *, trainable: bool = False) -> dict[nn.Module, nn.Module]:
    """Return the chain with these weights, as layers hold them, for every module that has the layer's weight."""
    weights = [nn.Parameter(weight, requires_grad=trainable) for weight in held]
    return {module: ChainLayers(module, layer.chain).build(*weights) for module in layer.modules}


def with_replaced(base: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return the model with other modules in the place of some, around the same tensors."""
    network = rewire(base, replacements)
    avoid_fast_paths_(network)
    return network


class Original:
    """The model itself, of which every size shares what is not decomposed.

    Attributes:
        base: the model; its parameters are not trainable any more.
        norms: the names of its batch normalisation layers.
    """

    def __init__(self, base: nn.Module, layers: tuple[Layer, ...]) -> None:
        self.trainable = {name: p.requires_grad for name, p in base.named_parameters(remove_duplicate=False)}
        self.base, self.layers = base.requires_grad_(False), layers
        self.norms = tuple(tracked_batch_norms(base))
        self._chains = {module: ChainLayers(module, layer.chain) for layer in layers for module in layer.modules}

    def at_size(self, parts: NetworkState) -> nn.Module:
        """Return the network of the current size, with the statistics that were calibrated for it."""
        module = self.uncalibrated(parts)
        for key, values in statistics_at(parts.plan, parts.statistics).items():
            name, _, kind = key.rpartition(".")
            module.get_submodule(name)._buffers[kind] = values.clone()
        return module

    @torch.inference_mode(False)  # a size made in that mode could not be used outside it
    @torch.no_grad()
    def uncalibrated(self, parts: NetworkState) -> nn.Module:
        """Return the same with the original's statistics: slices of the factors, or W̃ as one weight, for each layer.

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
        network = with_replaced(self.base, replacements)
        for name in self.norms:
            clone_buffers_(network.get_submodule(name))  # a pass in training mode writes to them
        self._put_(network, size.tuned)
        return network

    def vectors(self, layer_before_norm: Mapping[str, str]) -> tuple[dict[str, nn.Parameter], dict[str, str | None]]:
        """Return the parameters that can be tuned, and for each the layer by whose rank it is interpolated, if any.

        They have one axis at most. Those that a module holds elsewhere, too, as an LSTM does, are left alone: what
        holds them would not change. `layer_before_norm` are the layers that feed normalisation layers.
        """
        held = [
            each for module in self.base.modules() for each in vars(module).values() if isinstance(each, list | tuple)
        ]
        elsewhere = {id(entry) for entries in held for entry in entries}
        found = {
            name: parameter
            for name, parameter in self.base.named_parameters()
            if parameter.dim() <= 1 and parameter.numel() and parameter.is_floating_point()
            if id(parameter) not in elsewhere
        }
        layer_of = {module: layer.name for layer in self.layers for module in layer.modules}
        paths = {path: layer_of[module] for path, module in self.base.named_modules() if module in layer_of}
        feeders = {**paths, **layer_before_norm}
        return found, {name: feeders.get(name.rpartition(".")[0]) for name in found}

    @torch.inference_mode(False)
    def put_vectors_(self, values: Mapping[str, Tensor]) -> None:
        """Give the model these vectors, each laid end to end; what another thread runs keeps those it has."""
        self._put_(self.base, values)

    def _put_(self, network: nn.Module, values: Mapping[str, Tensor]) -> None:
        own = {name: self.base.get_parameter(name) for name in values}
        put_parameters_(network, {own[name]: _like(own[name], each) for name, each in values.items()})

    def in_factors(self, factors: Mapping[str, Factors]) -> nn.Module:
        """Return the network with these factors in place of every decomposed layer."""
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            replacements |= chains_of(layer, as_held(layer.chain, factors[layer.name]))
        return with_replaced(self.base, replacements)

    def with_trainable(self, module: nn.Module) -> nn.Module:
        """Return the network of a size, its parameters as trainable as the original's were."""
        for name, parameter in module.named_parameters():
            if name not in self.trainable:  # of a chain: conv.1.bias was conv.bias
                *path, _, kind = name.split(".")
                name = ".".join([*path, kind])
            parameter.requires_grad_(self.trainable[name])
        return module


def _with_weight(module: nn.Module, weight: nn.Parameter) -> nn.Module:
    """Return the same layer with another weight."""
    twin = rewire(module, {})
    twin._parameters["weight"] = weight
    return twin


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return values laid end to end as a parameter of that shape and type; it is not trained."""
    return nn.Parameter(values.view(parameter.shape).to(parameter.dtype, copy=True), requires_grad=False)
