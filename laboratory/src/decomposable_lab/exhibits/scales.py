"""What is trained for the exhibits: at the paper's scale for whoever has the GPUs, and at one that fits two cores.

Trainings lie in *groups*, a folder of a comparison each. Exhibits share groups: what one has trained is there for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decomposable import recipes
from decomposable.network.tuning import STEPS
from decomposable.recipes.settings import Settings
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.sweeps import default_settings
from decomposable_lab.methods.trp import TRPSettings
from decomposable_lab.methods.tucker.method import CIFAR_GRID, IMAGENET_GRID


@dataclass(frozen=True, kw_only=True)
class Group:
    """Name some methods under one protocol: a recipe with settings of its own, in a folder of its own."""

    folder: str
    recipe: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    settings: Mapping[str, Any] = field(default_factory=dict)
    network: str = ""  # and its data, in words

    @property
    def all_settings(self) -> Settings:
        """Return the recipe's with those of its own."""
        return with_overrides(default_settings(recipes.find(self.recipe)), self.settings)

    @property
    def title(self) -> str:
        """Return what is trained, and how long."""
        epochs = self.all_settings.epochs
        return f"{self.network}, {epochs} epoch{'s' if epochs > 1 else ''}"

    def with_methods(self, *methods: str) -> Group:
        """Return the same with these methods."""
        return replace(self, methods=methods)

    def with_settings(self, settings: Mapping[str, Any]) -> Group:
        """Return the same with these settings in place of its own."""
        return replace(self, settings={**self.settings, **settings})


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Hold `curves`, the networks and data sets of the large comparisons, and `ablation`, the one of everything else.

    Appendix E is about a network whose layers follow one another, without branches: `chain`, or that of the ablations.
    """

    name: str
    curves: tuple[Group, ...]
    ablation: Group
    connected: Group  # a fully connected network, for proposition 2
    chain: Group | None = None
    balances: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # λ above 0, of figure 2a
    tuning_steps: int = STEPS  # for each size, of `tune_`

    @property
    def in_both_forms(self) -> tuple[Group, ...]:
        """Return where TRP is trained in the channel form, too: large comparisons, or the network of the ablations."""
        groups = tuple(g for g in self.curves if "channel" in g.all_settings.of(TRPSettings).compare_forms)
        return groups or (self.ablation,)

    def on(self, folders: Sequence[str] | None) -> Scale:
        """Return the same with some of the networks and data sets of the large comparisons; None is all."""
        if folders is None:
            return self
        known = [group.folder for group in self.curves]
        for folder in folders:
            if folder not in known:
                raise InvalidArgumentError(f"--only {folder}: unknown; allowed at this scale: {', '.join(known)}")
        return replace(self, curves=tuple(group for group in self.curves if group.folder in folders))

    def of_each(self, change: Callable[[Group], Group]) -> Scale:
        """Return the same with every group changed."""
        return replace(
            self,
            curves=tuple(map(change, self.curves)),
            ablation=change(self.ablation),
            connected=change(self.connected),
            chain=self.chain and change(self.chain),
        )

    def timed(self, *methods: str) -> Group:
        """Return these methods on the network of the ablations, as long as it is trained for the large comparisons."""
        same = (group for group in self.curves if group.recipe == self.ablation.recipe)
        return next(same, self.ablation).with_methods(*methods)

    def compared(self, *methods: str) -> tuple[Group, ...]:
        """Return these methods on every network and data set of the large comparisons."""
        return tuple(group.with_methods(*methods) for group in self.curves)

    def chained(self, *methods: str) -> Group:
        """Return these methods on a network without branches."""
        return (self.chain or self.ablation).with_methods(*methods)

    def ablated(self, *methods: str, label: str = "", **settings: Any) -> Group:
        """Return these methods on the one network of the ablations, with settings of their own under a label."""
        base = self.ablation.with_methods(*methods)
        return labelled(base, label, **settings) if settings else base


def labelled(group: Group, label: str, **settings: Any) -> Group:
    """Return a group with settings of its own under a label."""
    return replace(group.with_settings(settings), folder=f"{group.folder}-{label}")


def _group(recipe: str, network: str, seeds: Iterable[int], folder: str = "", **settings: Any) -> Group:
    return Group(
        folder=folder or recipe, recipe=recipe, methods=(), seeds=tuple(seeds), settings=settings, network=network
    )


CONNECTED = "decomposable.recipes.small:fashion_connected"
# Batch normalisation is calibrated with the whole training set, as in the paper.
_ON_CIFAR: dict[str, Any] = {**CIFAR_GRID, "calibration_images": 50_000}
_ON_IMAGENET: dict[str, Any] = {**IMAGENET_GRID, "calibration_images": 1_281_167}
_VGG = _group("cifar10-vgg15", "VGG-15 on CIFAR-10", range(5), **_ON_CIFAR)
PAPER = Scale(
    name="paper",
    curves=(
        _VGG,
        _group("cifar100-resnet34", "ResNet-34 on CIFAR-100", range(5), **_ON_CIFAR),
        _group("imagenet-resnet50", "ResNet-50 on ImageNet", range(3), **_ON_IMAGENET),
    ),
    ablation=_group("cifar100-resnet34", "ResNet-34 on CIFAR-100", range(5), **_ON_CIFAR),
    connected=_group(CONNECTED, "a fully connected network on Fashion-MNIST", range(5), folder="connected", epochs=20),
    chain=_VGG,
)
LAPTOP = Scale(
    name="laptop",
    curves=(
        # TRP in the spatial form only, with two tries in place of the paper's sixteen; all others have one.
        _group("fashion-mnist", "a small CNN on Fashion-MNIST", range(2), compare_forms=("spatial",)),
        _group(
            "cifar10-resnet20",
            "ResNet-20 on CIFAR-10",
            range(1),
            epochs=2,
            tuning_epochs=1,
            sizes=(1.0, 0.75, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1),
            compare_energies=(0.95, 0.99),
            compare_strengths=(3e-4,),
            compare_forms=("spatial",),
        ),
    ),
    ablation=_group(
        "fashion-mnist",
        "a small CNN on Fashion-MNIST",
        range(1),
        folder="fashion-mnist-short",
        epochs=4,
        compare_energies=(0.99,),
    ),
    connected=_group(CONNECTED, "a fully connected network on Fashion-MNIST", range(1), folder="connected", epochs=4),
)
SCALES = {scale.name: scale for scale in (PAPER, LAPTOP)}


def merged(groups: Iterable[Group]) -> list[Group]:
    """Return each folder once, with the methods that any of the groups wants in it."""
    found: dict[str, Group] = {}
    for group in groups:
        before = found.get(group.folder, group)
        if (before.recipe, dict(before.settings)) != (group.recipe, dict(group.settings)):
            raise InvalidArgumentError(f"{group.folder}: two protocols in one folder; allowed: one")
        methods = tuple(dict.fromkeys((*before.methods, *group.methods)))
        seeds = tuple(sorted({*before.seeds, *group.seeds}))
        found[group.folder] = replace(group, methods=methods, seeds=seeds)
    return list(found.values())
