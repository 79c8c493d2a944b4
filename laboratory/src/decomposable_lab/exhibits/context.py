"""What a measurement sees: the curves of the trainings that its exhibit asked for, the networks, and the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposable import recipes
from decomposable.core.forms import short_form
from decomposable.data.base import Data
from decomposable.network.decomposed import DecomposedNet
from decomposable.progress import Progress, Report
from decomposable.recipes.settings import Settings
from decomposable.training import records
from decomposable.training.evaluation import accuracy
from decomposable.training.finishing import calibration_data_for
from decomposable.training.methods import METHODS, find
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import DataError
from decomposable_edge.files import write_atomically
from decomposable_edge.machine import timestamp
from decomposable_lab.exhibits.scales import Group, Scale
from decomposable_lab.exhibits.shown import Series
from decomposable_lab.methods.base import Training
from decomposable_lab.methods.loading import load
from decomposable_lab.methods.ours import style_of, trainings_of
from decomposable_lab.methods.sized import batch_statistics

BY_CHANNELS = ("slimmable", "us-net", "width")
"""Methods whose networks of a size are the same whatever was learnt, but for their weights."""

SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1)
"""At which networks are measured that no training has measured: parts of the MACs."""

SOME = 1000

Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Trained:
    """Hold a finished group of trainings: its curves, networks, data and settings."""

    group: Group
    folder: Path
    data_folder: Path | None
    report: Report
    device: torch.device  # where its networks are measured
    measurements: list[dict[str, Any]] = field(default_factory=list)  # where what was measured comes from

    @cached_property
    def _recipe(self) -> recipes.Recipe:
        return recipes.find(self.group.recipe)

    @cached_property
    def settings(self) -> Settings:
        """Return those of every training in it, but for what a method replaces."""
        return self.group.all_settings

    @cached_property
    def task(self) -> recipes.Task:
        """Return model, data and loss."""
        return recipes.make_task(self._recipe, self.data_folder, self.settings)

    @cached_property
    def data(self) -> Data:
        """Read once."""
        return self.task.load_data()

    @cached_property
    def _methods(self) -> dict[str, Any]:
        content = json.loads((self.folder / "comparison.json").read_text())
        return dict(content["methods"])

    @cached_property
    def example(self) -> Tensor:
        """Return one input, where the networks are."""
        return self.data.test_batch(torch.arange(1))[0].to(self.device)

    @property
    def calibration(self) -> Iterable[Any]:
        """Return augmented training images, to calibrate networks with after training; read when they are needed."""
        return calibration_data_for(self.data, self.settings, self.task.loss, lambda line: None).calibration

    @cached_property
    def some(self) -> list[Any]:
        """Return a thousand of them, in whole batches: enough to tune sizes with, or to say which bases matter."""
        few = replace(self.settings, calibration_images=min(SOME, self.settings.calibration_images))
        return list(calibration_data_for(self.data, few, self.task.loss, lambda line: None).calibration)

    def test_inputs(self, count: int) -> list[Tensor]:
        """Return the first so many test images."""
        places = torch.arange(min(count, self.data.test_count))
        return [self.data.test_batch(part)[0] for part in places.split(100)]

    def curves(self, method: str) -> dict[str, Points]:
        """Return all curves of a method, the largest size first."""
        return dict(self._methods[method]["curves"]) if method in self._methods else {}

    def shown(self, method: str) -> Points:
        """Return the curve that stands for a method; empty if it was not trained. TRP is in the form of all others."""
        if method not in self._methods:
            return ()
        curves = self._methods[method]["curves"]
        own = [points for name, points in curves.items() if name.startswith(f"trp_{short_form(self.settings.form)} ")]
        if method == "trp" and len(own) < len(curves):
            return [max(points, key=lambda point: point["accuracy"]) for points in zip(*own, strict=True)]
        points: Points = self._methods[method]["shown"]["points"]
        return points

    def network(self, method: str, seed: int | None = None, training: str = "") -> Any:
        """Return the network that a training has left."""
        path = self._place(method, seed) / training / "network.safetensors"
        if not path.is_file():
            raise DataError(f"{path}: it was not kept; remove {path.parent} to train it again")
        return load(path, model=self.task.build_model().to(self.device))

    def network_of_point(self, method: str, point: Mapping[str, Any]) -> Any:
        """Return the network of a point of a curve; of a method that cuts channels one with fresh weights if it was
        not kept, whose structure is the same.
        """
        trainings = list(trainings_of(method, self.settings))
        own = [each for each in trainings if point["curve"] in (each.curve, *each.variants)] or trainings
        kept = [each for each in own if (self._place(method) / each.folder / "network.safetensors").is_file()]
        if len(kept) < len(own) and method in BY_CHANNELS:
            nets = [self._fresh(method, each) for each in own]
        elif kept:
            nets = [self.network(method, training=kept[0].folder)]
        else:
            where, curve = self.folder / method, point["curve"]
            raise DataError(f"{where}: the network of {curve} was not kept; remove it to train it again")
        return min(nets, key=lambda net: _distance(net, point["macs_fraction"]))

    def _fresh(self, method: str, training: Training) -> Any:
        settings = with_overrides(self.settings, training.settings)
        model = self.task.build_model().to(self.device)
        network = find(method).network(model, self.example, settings, is_trained=False)
        material = calibration_data_for(self.data, settings, self.task.loss, lambda line: None)
        return find(method).sized(network.eval(), material, settings)

    def model(self, method: str, seed: int | None = None, training: str = "") -> nn.Module:
        """Return the trained model itself, of a method that decomposes: the network at full size."""
        net = self.network(method, seed, training)
        assert isinstance(net, DecomposedNet)
        return net.extract(net.selector.full_plan()).eval()

    def trainings(self, method: str, seed: int | None = None) -> list[str]:
        """Return the folders of a method's trainings; one without a name where there is only one."""
        return sorted(each.parent.name for each in self._place(method, seed).glob("*/network.safetensors")) or [""]

    def record(self, method: str, seed: int | None = None) -> dict[str, Any]:
        """Return what was run and what came out."""
        found: dict[str, Any] = json.loads((self._place(method, seed) / "record.json").read_text())
        return found

    def _place(self, method: str, seed: int | None = None) -> Path:
        return self.folder / method / str(self.seed if seed is None else seed)

    @property
    def seed(self) -> int:
        """Return the first one: whose networks are measured where one is enough."""
        return self.group.seeds[0]

    def kept(
        self,
        name: str,
        methods: Sequence[str],
        measure: Callable[[], Any],
        seeds: Sequence[int] | None = None,
        about: Any = None,
    ) -> Any:
        """Return what was measured of the networks of these methods, or `about` something else: once, and again only
        where one was trained anew.

        It is plain numbers and text, and lies beside the trainings in measured/NAME.json. So a break costs what was
        under way, and what has been measured can be judged and drawn again when its networks are gone.
        """
        path = self.folder / "measured" / f"{name}.json"
        paths = [f"{method}/{seed}/record.json" for method in methods for seed in seeds or (self.seed,)]
        of = {each: hashlib.sha256((self.folder / each).read_bytes()).hexdigest() for each in paths}
        wanted = {"of": of, "about": json.loads(json.dumps(about))}
        found = _read(path)
        if {key: found.get(key) for key in wanted} != wanted:
            values = json.loads(json.dumps(measure(), allow_nan=False))
            origin = {"made": timestamp(), "commit": records.commit(), "machine": records.machine()}
            found = {"what": name, **wanted, **origin, "values": values}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
        self.measurements.append({key: found[key] for key in ("what", "made", "commit", "machine")})
        return found["values"]

    def accuracy(self, module: nn.Module) -> float:
        """Return the accuracy in percent of the test images."""
        return accuracy(module, self.data, batch_size=250)

    def calibrated_accuracy(self, module: nn.Module, what: str) -> float:
        """Return the same with batch normalisation statistics of its own."""
        self.report(Progress("measuring", what))
        for name, (mean, var) in batch_statistics(module, self.calibration).items():
            module.get_submodule(name)._buffers.update(running_mean=mean, running_var=var)
        return self.accuracy(module)


@dataclass(frozen=True, eq=False)
class Context:
    """Hold all groups of an exhibit, by their folder."""

    scale: Scale
    out: Path
    data: Path | None
    report: Report
    device: torch.device
    measurements: list[dict[str, Any]] = field(default_factory=list)

    def of(self, group: Group) -> Trained:
        """Return the trainings of a group."""
        return Trained(group, self.out / group.folder, self.data, self.report, self.device, self.measurements)


def _distance(net: Any, size: float) -> float:
    """Return how far the nearest size of a network is from this one; a decomposed one has them all."""
    if isinstance(net, DecomposedNet):
        return 0.0
    return min(abs(float(np.log(each.macs_fraction / size))) for each in net.sizes)


def _read(path: Path) -> dict[str, Any]:
    """Return a measurement that was kept; nothing where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def series_of(points: Points, name: str, method: str, *, is_dashed: bool = False) -> Series:
    """Return a curve of a comparison: accuracy over MACs."""
    style = style_of(method)
    several = any(point["seeds"] > 1 for point in points)
    return Series(
        name=name,
        x=[point["macs_fraction"] for point in points],
        y=[point["accuracy"] for point in points],
        low=[point["lowest"] for point in points] if several else (),
        high=[point["highest"] for point in points] if several else (),
        method=method,
        is_dashed=is_dashed,
        is_points=style is not None and style.linestyle == "none",
    )


NEAREST = 0.1
"""How far beyond the ends of a curve its last point still counts: plans lie a little below their budgets."""


def at_size(points: Points, size: float, key: str = "accuracy") -> float:
    """Return a curve between its points, by the logarithm of the size; NaN well beyond its ends."""
    ordered = sorted(points, key=lambda point: point["macs_fraction"])
    if not ordered:
        return float("nan")
    low, high = ordered[0]["macs_fraction"], ordered[-1]["macs_fraction"]
    if not (1 - NEAREST) * low <= size <= (1 + NEAREST) * high:
        return float("nan")
    places = np.log([point["macs_fraction"] for point in ordered])
    return float(np.interp(np.log(size), places, [point[key] for point in ordered]))


def label_of(method: str) -> str:
    """Return what figures call a method."""
    return getattr(METHODS.get(method), "label", "") or method


def trp_label(curve: str) -> str:
    """Return what figures call a training of TRP.

    >>> trp_label("trp_sp 0.95-0.0003")
    'TRP, e = 0.95, τ = 0.0003'
    """
    energy, _, strength = curve.rpartition(" ")[2].partition("-")
    return f"TRP, e = {energy}, τ = {strength}"
