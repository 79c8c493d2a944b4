"""The trained model with every layer decomposed at its VBMF ranks, fine-tuned as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from decomposable.core.layers import Decomposable, avoid_fast_paths_
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.methods.base import LineStyle, Material, Method, Training
from decomposable.methods.settings import Settings
from decomposable.methods.tucker import layers as factored
from decomposable.methods.tucker.layers import FactorForm
from decomposable.methods.tucker.ranks import LayerRanks, Structure, is_dense, structure_of
from decomposable.methods.tucker.settings import TuckerSettings, tuning_schedule
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.network.sized import Size, SizedNet, batch_statistics
from decomposable.progress import Tracker

CURVES = {"tucker": "tucker_vbmf_ft", "channel": "ch_vbmf_ft", "spatial": "sp_vbmf_ft"}
"""How the paper's figures call the forms."""

_STRUCTURE = "_vbmf_structure"  # the attribute of a decomposed network that says what it was made from


class Tucker(Method):
    """Decomposition of a trained network at ranks that VBMF chooses, then fine-tuning."""

    name = "tucker"
    summary = "Tucker (or matrix) decomposition of a trained network at ranks by VBMF, then fine-tuning"
    label = "Tucker, VBMF, fine-tuned"
    style = LineStyle(color="#CC79A7", marker="P", linestyle=":", place=4)
    settings = TuckerSettings

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """The ranks are those of trained weights."""
        if not has_init:
            raise InvalidArgumentError(
                "method=tucker: it decomposes a trained network, and no weights came; "
                "allowed: --init with the weights of a trained network"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """A copy of the model in which plain factored layers stand in for those that they make cheaper."""
        self.check(settings, has_init=is_trained)
        base = deep_copy(rewire(unwrap(model), {}))
        structure = structure_of(base, example_input, cast(FactorForm, settings.of(TuckerSettings).vbmf_form))

        def factors(layer: LayerRanks, weight: Tensor) -> factored.Factors:
            return factored.decompose(weight, layer.form, layer.kept(1.0))

        return _with_factors(base, structure, factors)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> SizedNet:
        """The size that was fine-tuned, as it is, and smaller ones without retraining, with statistics of their own.

        For each of `settings.sizes` below it, the ranks are the largest common part ρ of the VBMF ranks within it, and
        the layers are decomposed again from the weights that their fine-tuned factors stand for. `SMALLER` of it where
        none of them is below.
        """
        network = deep_copy(network).eval()
        structure = _structure_of(network)
        build = partial(_build, network, structure)
        sizes = structure.sizes(settings.sizes)
        statistics = {}
        tracker = Tracker(material.progress, "statistics of smaller sizes", total=len(sizes) - 1, unit="sizes")
        for number, size in enumerate(sizes[1:] if tracked_batch_norms(network) else []):
            tracker.update(number)
            statistics[size.value] = batch_statistics(build(size), material.calibration)
        return SizedNet(
            method=self.name,
            network=network,
            sizes=sizes,
            build=build,
            statistics=statistics,
            structure=structure.as_json(),
        )

    def rebuilt(
        self, model: nn.Module, example_input: Tensor, settings: Settings, structure: Mapping[str, Any]
    ) -> tuple[nn.Module, Callable[[Size], nn.Module]]:
        """The network of a file with factors that are still 0, and the function from a `Size` to its plain module."""
        known = Structure.from_json(structure)
        base = deep_copy(rewire(unwrap(model), {}))
        for layer in known.layers:
            _check_layer(base, layer)

        def factors(layer: LayerRanks, weight: Tensor) -> factored.Factors:
            return factored.empty_factors(layer.shape, layer.form, layer.kept(1.0))

        network = _with_factors(base, known, factors)
        return network, partial(_build, network, known)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> Size:
        """Any part of the ranks."""
        return _structure_of(network).size(value)

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """For each form one at every point of the grid, from the network that normal learning trained."""
        own = settings.of(TuckerSettings)
        grid = itertools.product(
            own.compare_vbmf_forms, own.tuning_rates, own.tuning_weight_decays, own.tuning_schedules
        )
        found = [_training(own.tuning_epochs, *point) for point in grid]
        return tuple({training.folder: training for training in found}.values())


def _training(epochs: int, form: str, rate: float, weight_decay: float, schedule: str) -> Training:
    schedule_settings = tuning_schedule(schedule)
    assert schedule_settings is not None  # the settings have checked it
    kind, _, number = schedule.partition(":")
    point = f"lr{rate!r}-wd{weight_decay!r}-{kind}{float(number)!r}"
    return Training(
        curve=CURVES[form],
        folder=f"{form}-{point}",
        choice=point,
        settings={
            "vbmf_form": form,
            "epochs": epochs,
            "learning_rate": rate,
            "fine_tune_learning_rate": rate,
            "weight_decay": weight_decay,
            "warmup_epochs": 0.0,
            **schedule_settings,
        },
        init="plain",
    )


def _with_factors(
    base: nn.Module, structure: Structure, factors_for: Callable[[LayerRanks, Tensor], factored.Factors]
) -> nn.Module:
    """The network with plain factored layers, trainable as the dense ones were."""
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in structure.layers:
        kept = layer.kept(1.0)
        if is_dense(kept):
            continue
        modules = [cast(Decomposable, base.get_submodule(path)) for path in layer.modules]
        weight = modules[0].weight
        # Layers that share a weight share its factors.
        weights = factored.parameters_for(layer.shape, layer.form, factors_for(layer, weight), weight)
        for module in modules:
            replacements[module] = factored.stand_in(module, layer.form, kept, weights)
    network = _laid_out_like(base, rewire(base, replacements))
    avoid_fast_paths_(network)
    network.__dict__[_STRUCTURE] = structure  # not by setattr, which a model may have of its own
    return network


@torch.no_grad()
def _build(network: nn.Module, structure: Structure, size: Size) -> nn.Module:
    """The plain module of a size, made from the weights that the network has now."""
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in structure.layers if size.value < 1 else ():
        replacements.update(_smaller(network, layer, size.value))
    module = deep_copy(rewire(network, replacements))
    module.__dict__.pop(_STRUCTURE, None)
    return _laid_out_like(network, module)


def _smaller(network: nn.Module, layer: LayerRanks, part: float) -> dict[nn.Module, nn.Module]:
    """The modules of one layer, and those that take their places at a part of the ranks."""
    before, kept = layer.kept(1.0), layer.kept(part)
    if kept == before:
        return {}
    modules = [network.get_submodule(path) for path in layer.modules]
    if is_dense(before):
        dense = [cast(Decomposable, module) for module in modules]
        weight = dense[0].weight
        factors = factored.decompose(weight, layer.form, kept)
        weights = factored.parameters_for(layer.shape, layer.form, factors, weight)
        return {module: factored.stand_in(module, layer.form, kept, weights) for module in dense}
    old = [cast(nn.Sequential, module) for module in modules]
    factors = factored.decompose_again(factored.factors_in(old[0], layer.form, before), kept)
    weights = factored.parameters_for(layer.shape, layer.form, factors, cast(Tensor, old[0][0].weight))
    return {module: factored.smaller_stand_in(module, layer.form, before, kept, weights) for module in old}


def _laid_out_like(original: nn.Module, module: nn.Module) -> nn.Module:
    """The module with its weights in channels-last layout where the original has one that can only be that."""
    is_last = any(
        p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous()
        for p in original.parameters()
    )
    return module.to(memory_format=torch.channels_last) if is_last else module  # type: ignore[call-overload]


def _structure_of(network: nn.Module) -> Structure:
    structure = network.__dict__.get(_STRUCTURE)
    if not isinstance(structure, Structure):
        raise InvalidArgumentError(
            f"method=tucker: got a {type(network).__name__} that it did not decompose; allowed: what network() returned"
        )
    return structure


def _check_layer(base: nn.Module, layer: LayerRanks) -> None:
    """Refuse a model that does not have a layer of the file."""
    for path in layer.modules:
        try:
            weight = base.get_submodule(path).weight
        except AttributeError:
            weight = None
        if not isinstance(weight, Tensor) or tuple(weight.shape) != layer.shape:
            came = "none" if not isinstance(weight, Tensor) else f"one of shape {tuple(weight.shape)}"
            raise ArtifactError(
                f"structure: layer '{path}' has a weight of shape {layer.shape}, the model has {came}; "
                "allowed: the model that was trained"
            )


METHOD = Tucker()
