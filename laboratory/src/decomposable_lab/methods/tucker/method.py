"""The trained model with every layer decomposed at its VBMF ranks, fine-tuned as it is; its settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from decomposable.core.factors import memory_format_of
from decomposable.core.layers import Decomposable, avoid_fast_paths_
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.network.calibration.statistics import tracked_batch_norms
from decomposable.progress import Tracker
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings, is_one_of
from decomposable.training.methods.base import CalibrationData
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_lab.methods.base import LineStyle, Rival, Training
from decomposable_lab.methods.sized import MethodSize, SizedNet, batch_statistics
from decomposable_lab.methods.tucker import layers as factored
from decomposable_lab.methods.tucker.layers import FactorForm
from decomposable_lab.methods.tucker.ranks import LayerRanks, Structure, is_dense, structure_of
from decomposable_lab.methods.tucker.tensors import Kept

CURVES = {"tucker": "tucker_vbmf_ft", "channel": "ch_vbmf_ft", "spatial": "sp_vbmf_ft"}
"""How the paper's figures call the forms."""

_STRUCTURE = "_vbmf_structure"  # the attribute of a decomposed network that says what it was made from

CIFAR_GRID: dict[str, Any] = {
    "tuning_rates": (0.0005, 0.001, 0.005, 0.01),
    "tuning_weight_decays": (0.00005, 0.0001, 0.0005, 0.001),
    "tuning_schedules": ("steps:0.5", "steps:0.2", "steps:0.1", "polynomial:1", "polynomial:1.5", "polynomial:2"),
}
"""All of appendix D's grid for CIFAR: 96 trainings for each form, of 15 epochs. For both CIFAR sets the paper found
rate 0.01, weight decay 0.001 and polynomial decay of power 1.5 to be best: the defaults of the settings."""

IMAGENET_GRID: dict[str, Any] = {
    "tuning_rates": (0.001, 0.01),
    "tuning_weight_decays": (0.0001, 0.001),
    "tuning_schedules": ("steps:0.2", "steps:0.1"),
}
"""Appendix D's grid for ImageNet; best were rate 0.01, weight decay 0.0001 and a decay of 0.2."""


def tuning_schedule(text: str) -> dict[str, Any]:
    """Return the settings that a schedule of appendix D stands for; none if there is no such schedule.

    >>> tuning_schedule("polynomial:1.5"), tuning_schedule("linear")
    ({'schedule': 'polynomial', 'power': 1.5}, {})
    """
    kind, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        return {}
    known = {
        "polynomial": {"schedule": "polynomial", "power": value},
        "steps": {"schedule": "steps", "milestones": (1 / 3, 2 / 3), "decay": value},
    }
    return known.get(kind, {}) if 0 < value < inf else {}


@dataclass(frozen=True, kw_only=True)
class TuckerSettings(MethodSettings):
    """Hold the form, and the grid of appendix D; the defaults are the point that was best for the paper."""

    vbmf_form: str = "tucker"  # or "channel" or "spatial", in place of Tucker-2

    compare_vbmf_forms: tuple[str, ...] = tuple(CURVES)
    tuning_epochs: int = 15
    tuning_rates: tuple[float, ...] = (0.01,)
    tuning_weight_decays: tuple[float, ...] = (1e-3,)
    tuning_schedules: tuple[str, ...] = ("polynomial:1.5",)  # a power; or "steps:0.2", a decay at epochs 5 and 10

    swept: ClassVar[Mapping[str, str]] = {"vbmf_form": "compare_vbmf_forms"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("vbmf_form",), "tucker, channel, spatial", is_one_of(*CURVES)),
        (("compare_vbmf_forms",), "some of tucker, channel, spatial", lambda v: v and {*v} <= {*CURVES}),
        (("tuning_epochs",), "an int of at least 1", lambda v: v >= 1),
        (("tuning_rates",), "numbers above 0", lambda v: v and all(0 < r < inf for r in v)),
        (("tuning_weight_decays",), "numbers of at least 0", lambda v: v and all(0 <= r < inf for r in v)),
        (
            ("tuning_schedules",),
            "polynomial:POWER or steps:DECAY, as in polynomial:1.5,steps:0.2",
            lambda v: v and all(map(tuning_schedule, v)),
        ),
    )


class Tucker(Rival):
    """Decompose a trained network at ranks that VBMF chooses, then fine-tune it."""

    name = "tucker"
    summary = "Tucker (or matrix) decomposition of a trained network at ranks by VBMF, then fine-tuning"
    label = "Tucker, VBMF, fine-tuned"
    style = LineStyle(color="#8C6BB1", marker="P", linestyle=":", place=4)
    settings = TuckerSettings
    decomposes = False

    def check(self, settings: Settings, *, has_init: bool) -> None:
        """Refuse a start from scratch: the ranks are those of trained weights."""
        if not has_init:
            raise InvalidArgumentError(
                "method=tucker: it decomposes a trained network, and no weights came; "
                "allowed: --init with the weights of a trained network"
            )

    def network(self, model: nn.Module, example_input: Tensor, settings: Settings, *, is_trained: bool) -> nn.Module:
        """Return a copy of the model in which plain factored layers stand in for those that they make cheaper."""
        self.check(settings, has_init=is_trained)
        base = deep_copy(rewire(unwrap(model), {}))
        form = cast(FactorForm, settings.of(TuckerSettings).vbmf_form)
        return _with_factors(base, structure_of(base, example_input, form))

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> SizedNet:
        """Return the size that was fine-tuned, and smaller ones without retraining, with statistics of their own.

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
    ) -> tuple[nn.Module, Callable[[MethodSize], nn.Module]]:
        """Return the network of a file with factors still 0, and the function from a `MethodSize` to its module."""
        known = Structure.from_json(structure)
        base = deep_copy(rewire(unwrap(model), {}))
        for layer in known.layers:
            _check_layer(base, layer)
        network = _with_factors(base, known, are_empty=True)
        return network, partial(_build, network, known)

    def size_again(self, network: nn.Module, value: float, example_input: Tensor) -> MethodSize:
        """Return any part of the ranks."""
        return _structure_of(network).size(value)

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """Return for each form one at every point of the grid, from the network that normal learning trained."""
        own = settings.of(TuckerSettings)
        points = itertools.product(
            own.compare_vbmf_forms, own.tuning_rates, own.tuning_weight_decays, own.tuning_schedules
        )
        trainings = (_training(own.tuning_epochs, *point) for point in points)
        return tuple({training.folder: training for training in trainings}.values())


def _training(epochs: int, form: str, rate: float, weight_decay: float, schedule: str) -> Training:
    kind, _, number = schedule.partition(":")
    point = f"lr{rate!r}-wd{weight_decay!r}-{kind}{float(number)!r}"
    rates = {"learning_rate": rate, "fine_tune_learning_rate": rate, "weight_decay": weight_decay}
    return Training(
        curve=CURVES[form],
        folder=f"{form}-{point}",
        choice=point,
        settings={"vbmf_form": form, "epochs": epochs, "warmup_epochs": 0.0, **rates, **tuning_schedule(schedule)},
        init="plain",
    )


def _with_factors(base: nn.Module, structure: Structure, *, are_empty: bool = False) -> nn.Module:
    """The network with plain factored layers, trainable as the dense ones were; empty ones are filled from a file."""
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in structure.layers:
        if not is_dense(layer.kept(1.0)):
            replacements |= _instead_of_dense(base, layer, layer.kept(1.0), are_empty=are_empty)
    network = _laid_out_like(base, rewire(base, replacements))
    avoid_fast_paths_(network)
    network.__dict__[_STRUCTURE] = structure  # not by setattr, which a model may have of its own
    return network


def _instead_of_dense(
    network: nn.Module, layer: LayerRanks, kept: Kept, *, are_empty: bool = False
) -> dict[nn.Module, nn.Module]:
    """Return the dense modules of one layer, and the factored ones that take their places; they share their factors."""
    shape, form = layer.shape, layer.form
    modules = [cast(Decomposable, network.get_submodule(path)) for path in layer.modules]
    weight = modules[0].weight
    factors = factored.empty_factors(shape, form, kept) if are_empty else factored.decompose(weight, form, kept)
    weights = factored.parameters_for(shape, form, factors, weight)
    return {module: factored.stand_in(module, form, kept, weights) for module in modules}


@torch.no_grad()
def _build(network: nn.Module, structure: Structure, size: MethodSize) -> nn.Module:
    """Return the plain module of a size, made from the weights that the network has now."""
    replacements: dict[nn.Module, nn.Module] = {}
    for layer in structure.layers if size.value < 1 else ():
        replacements.update(_smaller(network, layer, size.value))
    module = deep_copy(rewire(network, replacements))
    module.__dict__.pop(_STRUCTURE, None)
    return _laid_out_like(network, module)


def _smaller(network: nn.Module, layer: LayerRanks, part: float) -> dict[nn.Module, nn.Module]:
    """Return the modules of one layer, and those that take their places at a part of the ranks."""
    before, kept = layer.kept(1.0), layer.kept(part)
    if kept == before:
        return {}
    if is_dense(before):
        return _instead_of_dense(network, layer, kept)
    old = [cast(nn.Sequential, network.get_submodule(path)) for path in layer.modules]
    factors = factored.decompose_again(factored.factors_in(old[0], layer.form, before), kept)
    weights = factored.parameters_for(layer.shape, layer.form, factors, cast(Tensor, old[0][0].weight))
    return {module: factored.smaller_stand_in(module, layer.form, before, kept, weights) for module in old}


def _laid_out_like(original: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module with its weights in channels-last layout where the original has one that can only be that."""
    is_last = any(memory_format_of(p) is torch.channels_last for p in original.parameters())
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
