"""The settings of a training: typed, validated where they are made, and never changed.

`Settings` has what all methods share. What a single method depends on is a dataclass of its own, a `MethodSettings`;
`of_methods` holds those that are not as their method has them:

    settings = Settings(epochs=3, method="elastic", of_methods=(ElasticSettings(elastic_start=0.3),))
    settings.of(ElasticSettings).elastic_start

The command line knows all of them by flat names, such as ``elastic_start=0.3`` (`training/methods/flat.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from decomposable.core.criteria import CRITERIA
from decomposable.core.forms import FORMS, is_form
from decomposable.recipes.values import MOST, Check, Checked, MethodSettings, as_text, is_one_of
from decomposable_edge.errors import InvalidArgumentError, SettingError

Own = TypeVar("Own", bound=MethodSettings)
SCHEDULES = ("steps", "cosine", "constant", "polynomial")
OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("float32", "bfloat16")
INF = math.inf


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """What a training depends on. The defaults are the paper's for CIFAR (section 4 and appendix D).

    A recipe is a function whose parameter `settings` has one of these as its default; `decomposable train RECIPE --set
    key=value` replaces single values. A subclass may add fields of its own.
    """

    method: str = "decomposable"  # or another of `decomposable.training.methods`, such as "plain": normal learning
    epochs: int = 200
    seed: int = 0  # of the initial weights, the order of the images, their augmentation, dropout and Z
    batch_size: int = 128

    learning_rate: float = 0.1
    fine_tune_learning_rate: float = 0.01  # in its place where training starts from weights that are given
    schedule: str = "steps"  # of the learning rate: "steps", "cosine", "constant" or "polynomial"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # for "steps", parts of the training: epochs 60, 120, 160 of 200
    decay: float = 0.2  # for "steps", what the rate is multiplied with at each milestone
    power: float = 1.0  # for "polynomial", of the part of the training that is left
    warmup_epochs: float = 0.0  # in which the rate rises from zero
    optimizer: str = "sgd"  # or "adamw", as transformers are trained, with β₁ = momentum and β₂ = 0.98
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4  # η, for the kernels of convolutions and linear layers only
    clip_norm: float = 0.0  # the largest norm of the gradient; 0 is no limit

    # Of the joint objective; `elastic` has a draw and a refresh of its own, `decompose` reads the form, the criterion
    # and the least rank, too:
    form: str = "spatial"
    ratio: tuple[float, float] = (0.01, 0.5)  # α_l and α_u, between which Z is drawn
    balance: float = 0.5  # λ
    criterion: str = "singular_value"
    min_rank: int = 1
    refresh: int = 1  # steps from one SVD to the next

    of_methods: tuple[MethodSettings, ...] = ()
    """Those of single methods that are not as the methods have them, at most one of each class."""

    mean: tuple[float, ...] = ()  # of the pixels per channel, as parts of white
    std: tuple[float, ...] = ()
    workers: int = 0  # processes that make batches ahead
    precision: str = "float32"  # or "bfloat16", under autocast
    channels_last: bool = False  # the layout in memory: faster for most convolutional networks

    evaluate_every: int = 1  # epochs from one test to the next
    calibration_images: int = 1000  # for the batch normalisation statistics of all sizes
    calibration_passes: float = 60.0  # of the full network over those images: what a grid of sizes may cost
    calibrated_sizes: tuple[float, ...] = ()  # in place of a grid from the smallest size to the full one
    calibrated_alignments: tuple[int, ...] = ()  # sizes with ranks rounded to these multiples, besides
    # Measured at the end:
    sizes: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)

    checks: ClassVar[tuple[Check, ...]] = (
        (("epochs", "batch_size", "min_rank", "refresh", "evaluate_every"), "an int of at least 1", lambda v: v >= 1),
        (("calibration_images",), "an int of at least 2", lambda v: v >= 2),
        (("workers",), "an int of at least 0", lambda v: v >= 0),
        (("seed",), f"an int from 0 to {MOST}", lambda v: v >= 0),
        (("learning_rate", "fine_tune_learning_rate", "decay", "power"), "a number above 0", lambda v: 0 < v < INF),
        (("weight_decay", "clip_norm", "warmup_epochs"), "a number of at least 0", lambda v: 0 <= v < INF),
        (("momentum",), "a number from 0 to below 1", lambda v: 0 <= v < 1),
        (("balance",), "a number in [0, 1]", lambda v: 0 <= v <= 1),
        (("ratio",), "two numbers with 0 < low <= high <= 1, as in 0.01,0.5", lambda v: 0 < v[0] <= v[1] <= 1),
        (("milestones",), "parts of the training, as in 0.3,0.6,0.8", lambda v: all(0 < m < 1 for m in v)),
        (("mean",), "finite numbers", lambda v: all(map(math.isfinite, v))),
        (("std",), "numbers above 0", lambda v: all(0 < s < INF for s in v)),
        (("calibration_passes",), "a number of at least 3", lambda v: 3 <= v < INF),
        (("calibrated_sizes",), "parts of the MACs, as in 0.25,0.5,1", lambda v: all(0 < s <= 1 for s in v)),
        (("calibrated_alignments",), "multiples, as in 8,16", lambda v: all(a >= 1 for a in v)),
        (("sizes",), "parts of the MACs, as in 0.25,0.5,1", lambda v: v and all(0 < s <= 1 for s in v)),
        (("schedule",), ", ".join(SCHEDULES), is_one_of(*SCHEDULES)),
        (("optimizer",), ", ".join(OPTIMIZERS), is_one_of(*OPTIMIZERS)),
        (("precision",), ", ".join(PRECISIONS), is_one_of(*PRECISIONS)),
        (("form",), f"{', '.join(FORMS)}, or by name as in layer4.*:tucker,*:spatial", is_form),
        (("criterion",), f"{', '.join(CRITERIA)}; taylor after training", is_one_of(*CRITERIA, "taylor")),
        (("method",), "a name", bool),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise InvalidArgumentError(
                f"std={as_text(self.std)}; allowed: as many numbers as mean has, {len(self.mean)}"
            )
        kinds = [type(own) for own in self.of_methods]
        if len({*kinds}) < len(kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise SettingError("of_methods", names, "at most one of each class")
        # Without defaults and in one order: settings that mean the same are equal.
        changed = sorted((own for own in self.of_methods if own != type(own)()), key=lambda own: type(own).__qualname__)
        object.__setattr__(self, "of_methods", tuple(changed))

    def of(self, kind: type[Own]) -> Own:
        """Return the settings that a single method has of its own."""
        return next((own for own in self.of_methods if type(own) is kind), kind())
