"""The settings of a training: typed, validated where they are made, and set from text on the command line.

`Settings` has what all methods share. What a single method depends on, that method declares beside itself, as a
`MethodSettings`; whoever makes, replaces, reads or stores settings sees one flat list of names:

    settings = Settings(epochs=3, trp_energy=0.99)    from_text(settings, ["trp_energy=0.99"])    settings.trp_energy
    own = settings.of(TRPSettings)                    in the method itself: own.trp_energy, with its type
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from decomposable.core.criteria import CRITERIA
from decomposable.core.forms import FORMS, is_form
from decomposable.training.methods.registry import kinds, own_defaults
from decomposable.recipes.values import MOST, Check, Checked, MethodSettings, Text, as_text, is_one_of
from decomposable_edge.errors import InvalidArgumentError, SettingError
from decomposable_edge.sizing.plans import FrozenDict

if TYPE_CHECKING:  # to whom the settings of single methods are fields like all others; at run time `_FlatNames` is why
    from decomposable.training.methods.decomposable import JointSettings
    from decomposable.training.methods.elastic import ElasticSettings
    from decomposable_lab.methods.scratch import ScratchSettings
    from decomposable_lab.methods.slimmable import SlimmableSettings
    from decomposable_lab.methods.trp import TRPSettings
    from decomposable_lab.methods.tucker.method import TuckerSettings
    from decomposable_lab.methods.us_net import UniversalSettings
    from decomposable_lab.methods.width import WidthSettings

    @dataclass(frozen=True, kw_only=True)
    class _OfAll(
        WidthSettings,
        ScratchSettings,
        TRPSettings,
        TuckerSettings,
        SlimmableSettings,
        UniversalSettings,
        JointSettings,
        ElasticSettings,
    ):
        pass

else:
    _OfAll = Checked

Own = TypeVar("Own", bound=MethodSettings)
_OWN = "of_methods"
SCHEDULES = ("steps", "cosine", "constant", "polynomial")
OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("float32", "bfloat16")
INF = math.inf


class _OfMethods(FrozenDict[Any]):
    """Settings of single methods by name."""

    refusal = "settings cannot be changed; make new ones with dataclasses.replace(settings, name=value)"


class _FlatNames(type):
    """Takes settings of single methods beside the shared ones, wherever settings are made or replaced."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        shared = {each.name for each in fields(cls)}  # type: ignore[arg-type]  # every such class is a dataclass
        given = values.get(_OWN, {})
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise SettingError(_OWN, as_text(given), "a dict of settings by name")
        own = {name: values.pop(name) for name in own_defaults().keys() & values.keys() - shared}
        if own:
            values[_OWN] = {**given, **own}
        return super().__call__(*args, **values)


@dataclass(frozen=True, kw_only=True)
class Settings(_OfAll, metaclass=_FlatNames):
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

    of_methods: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Those of single methods (docs/compare.md) that are not as the methods have them, by name."""

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
        defaults = own_defaults()
        _require_known(self.of_methods, defaults)
        # Without those that are as the methods have them: settings are the same whatever has been registered meanwhile.
        changed = {
            name: value
            for kind in kinds()
            if (given := _part(self.of_methods, kind))
            for name, value in vars(kind(**given)).items()
            if value != defaults[name]
        }
        object.__setattr__(self, _OWN, _OfMethods(changed))

    def of(self, kind: type[Own]) -> Own:
        """The settings that a single method has of its own."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})

    if not TYPE_CHECKING:  # who would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            """A setting of a single method by its flat name."""
            defaults = own_defaults()
            if name not in defaults:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.of_methods.get(name, defaults[name])


def _part(values: Mapping[str, Any], kind: type[MethodSettings]) -> dict[str, Any]:
    """Those of the values that such settings have."""
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


def flat(settings: Settings) -> dict[str, Any]:
    """All settings by name: the shared ones, those of every method, and whatever a subclass adds."""
    values: dict[str, Any] = {}
    for name, value in asdict(settings).items():
        values |= {own: getattr(settings, own) for own in own_defaults()} if name == _OWN else {name: value}
    return values


_USUAL_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "bs": "batch_size",
    "batch": "batch_size",
    "num_workers": "workers",
    "lambda": "balance",
    "z": "ratio",
    "grad_clip": "clip_norm",
    "amp": "precision",
    "num_classes": "classes",
}

AnySettings = TypeVar("AnySettings", bound=Settings)


def with_overrides(settings: AnySettings, overrides: Mapping[str, Any]) -> AnySettings:
    """The settings with some values replaced; an unknown name is refused with the nearest one.

    >>> with_overrides(Settings(), {"epochs": 3}).epochs
    3
    """
    names = [name for name, value in overrides.items() if name != _OWN or isinstance(value, Text)]
    _require_known(names, flat(settings))
    return replace(settings, **overrides)


def _require_known(names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            plain = name.replace("-", "_").lower()
            usual = [_USUAL_NAMES[plain]] if plain in _USUAL_NAMES else []
            near = usual or difflib.get_close_matches(plain, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
            raise InvalidArgumentError(f"no setting is called {name}; {hint}")


def from_text(settings: AnySettings, assignments: Iterable[str]) -> AnySettings:
    """The settings with values replaced as a command line gives them.

    >>> from_text(Settings(), ["epochs=3", "ratio=0.05,0.8", "nesterov=false"]).ratio
    (0.05, 0.8)
    """
    overrides = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidArgumentError(f"--set {assignment}: there is no '='; allowed: key=value, as in epochs=10")
        overrides[name.strip()] = Text(text.strip())
    return with_overrides(settings, overrides)


def from_plain(settings: AnySettings, stored: Mapping[str, Any]) -> AnySettings:
    """The settings with those replaced that were stored as JSON, where text stands for whatever has no other form."""
    known = flat(settings)
    texts = {name: Text(value) if isinstance(value, str) else value for name, value in stored.items()}
    return with_overrides(settings, {name: value for name, value in texts.items() if name in known})
