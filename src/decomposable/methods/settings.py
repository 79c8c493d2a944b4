"""The settings of a training: typed, validated where they are made, and set from text on the command line."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from decomposable.errors import InvalidArgumentError

SCHEDULES = ("steps", "cosine", "constant", "polynomial")
PRECISIONS = ("float32", "bfloat16")
VBMF_FORMS = ("tucker", "channel", "spatial")
MOST = 2**31 - 1
"""Of a whole number in the settings: epochs, images and seeds are far below."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a training depends on. The defaults are the paper's for CIFAR (section 4 and appendix D).

    A recipe is a function whose parameter `settings` has one of these as its default; `decomposable train RECIPE --set
    key=value` replaces single values. A subclass may add fields of its own.
    """

    method: str = "decomposable"  # or another of `decomposable.methods`, such as "plain": normal learning
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
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4  # η, for the kernels of convolutions and linear layers only
    clip_norm: float = 0.0  # the largest norm of the gradient; 0 is no limit

    form: str = "spatial"
    ratio: tuple[float, float] = (0.01, 0.5)  # α_l and α_u, between which Z is drawn
    balance: float = 0.5  # λ
    criterion: str = "singular_value"
    min_rank: int = 1
    refresh: int = 1  # steps from one SVD to the next

    # Of single methods (docs/compare.md)
    width: float = 1.0  # width: the part of the channels
    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # slimmable
    width_loss: str = "mean"  # slimmable: "mean" or "sum" of the losses of all widths
    width_range: tuple[float, float] = (0.25, 1.0)  # us-net: the smallest and the largest width
    random_widths: int = 2  # us-net: in every step, besides these two
    width_multiple: int = 1  # channels are rounded down to multiples of this
    ranks: tuple[int, ...] = ()  # scratch: of the layers in order
    trp_energy: float = 0.999  # trp: e, the part of the energy Σσ² that truncation keeps
    trp_strength: float = 3e-4  # trp: τ, of the nuclear norm
    trp_interval: int = 1  # trp: T, steps from one truncation to the next
    trp_layers: str = "all"  # trp: or "inner", as in its authors' code: convolutions but the first and those of 1 × 1
    vbmf_form: str = "tucker"  # tucker: or "channel" or "spatial", in place of Tucker-2

    # What a comparison trains (decomposable compare)
    compare_widths: tuple[float, ...] = (0.75, 0.5)
    compare_ranks: tuple[float, ...] = (0.25,)  # scratch: the sizes whose ranks Decomposable-Net gives
    compare_energies: tuple[float, ...] = (0.995, 0.999, 0.9995, 0.9999)  # trp: the paper's for CIFAR
    compare_strengths: tuple[float, ...] = (1e-4, 3e-4)
    compare_forms: tuple[str, ...] = ("spatial", "channel")  # trp
    compare_vbmf_forms: tuple[str, ...] = ("tucker", "channel", "spatial")
    tuning_epochs: int = 15
    tuning_rates: tuple[float, ...] = (0.01,)  # of appendix D's grid the values that were best for the paper
    tuning_weight_decays: tuple[float, ...] = (1e-3,)
    tuning_schedules: tuple[str, ...] = ("polynomial:1.5",)  # a power; or "steps:0.2", a decay at epochs 5 and 10

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
    sizes: tuple[float, ...] = (
        1.0,
        0.9,
        0.8,
        0.7,
        0.6,
        0.5,
        0.4,
        0.35,
        0.3,
        0.25,
        0.2,
        0.15,
        0.1,
    )  # measured at the end

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _typed(type(self), field.name, getattr(self, field.name)))
        for names, allowed, is_right in _CHECKS:
            for name in names:
                if not is_right(getattr(self, name)):
                    raise InvalidArgumentError(f"{name}={_as_text(getattr(self, name))}; allowed: {allowed}")
        if len(self.mean) != len(self.std):
            raise InvalidArgumentError(
                f"std={_as_text(self.std)}; allowed: as many numbers as mean has, {len(self.mean)}"
            )


def tuning_schedule(text: str) -> dict[str, Any] | None:
    """The settings that a schedule of appendix D stands for; None where it is none.

    >>> tuning_schedule("polynomial:1.5"), tuning_schedule("linear")
    ({'schedule': 'polynomial', 'power': 1.5}, None)
    """
    kind, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        return None
    if kind == "polynomial" and 0 < value < float("inf"):
        return {"schedule": "polynomial", "power": value}
    if kind == "steps" and 0 < value < float("inf"):
        return {"schedule": "steps", "milestones": (1 / 3, 2 / 3), "decay": value}
    return None


def _is_one_of(allowed: Iterable[str]) -> Callable[[Any], bool]:
    return lambda value: value in allowed


_CHECKS: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (("epochs", "batch_size", "min_rank", "refresh", "evaluate_every"), "an int of at least 1", lambda v: v >= 1),
    (("calibration_images",), "an int of at least 2", lambda v: v >= 2),
    (("workers",), "an int of at least 0", lambda v: v >= 0),
    (("seed",), f"an int from 0 to {MOST}", lambda v: v >= 0),
    (("learning_rate", "fine_tune_learning_rate", "decay"), "a number above 0", lambda v: 0 < v < float("inf")),
    (("weight_decay", "clip_norm", "warmup_epochs"), "a number of at least 0", lambda v: 0 <= v < float("inf")),
    (("momentum",), "a number from 0 to below 1", lambda v: 0 <= v < 1),
    (("balance",), "a number in [0, 1]", lambda v: 0 <= v <= 1),
    (("ratio",), "two numbers with 0 < low <= high <= 1, as in 0.01,0.5", lambda v: 0 < v[0] <= v[1] <= 1),
    (("milestones",), "parts of the training, as in 0.3,0.6,0.8", lambda v: all(0 < m < 1 for m in v)),
    (("mean",), "finite numbers", lambda v: all(map(math.isfinite, v))),
    (("std",), "numbers above 0", lambda v: all(0 < s < float("inf") for s in v)),
    (("calibration_passes",), "a number of at least 3", lambda v: 3 <= v < float("inf")),
    (("calibrated_sizes",), "parts of the MACs, as in 0.25,0.5,1", lambda v: all(0 < s <= 1 for s in v)),
    (("calibrated_alignments",), "multiples, as in 8,16", lambda v: all(a >= 1 for a in v)),
    (("sizes",), "parts of the MACs, as in 0.25,0.5,1", lambda v: v and all(0 < s <= 1 for s in v)),
    (("schedule",), ", ".join(SCHEDULES), _is_one_of(SCHEDULES)),
    (("precision",), ", ".join(PRECISIONS), _is_one_of(PRECISIONS)),
    (("form",), "spatial, channel", _is_one_of(("spatial", "channel"))),
    (
        ("criterion",),
        "singular_value, energy, uniform; taylor after training",
        _is_one_of(("singular_value", "energy", "uniform", "taylor")),
    ),
    (("method",), "a name", bool),
    (("power",), "a number above 0", lambda v: 0 < v < float("inf")),
    (("width",), "a part of the channels in (0, 1]", lambda v: 0 < v <= 1),
    (("widths", "compare_widths"), "parts of the channels, as in 0.5,1", lambda v: v and all(0 < w <= 1 for w in v)),
    (("width_range",), "two widths with 0 < low <= high <= 1, as in 0.25,1", lambda v: 0 < v[0] <= v[1] <= 1),
    (("width_loss",), "mean, sum", _is_one_of(("mean", "sum"))),
    (("random_widths",), "an int of at least 0", lambda v: v >= 0),
    (("width_multiple", "trp_interval", "tuning_epochs"), "an int of at least 1", lambda v: v >= 1),
    (("ranks",), "ints of at least 1", lambda v: all(r >= 1 for r in v)),
    (("compare_ranks",), "parts of the MACs, as in 0.25,0.5", lambda v: v and all(0 < s <= 1 for s in v)),
    (("trp_energy",), "a part of the energy in (0, 1]", lambda v: 0 < v <= 1),
    (("compare_energies",), "parts of the energy, as in 0.99,0.999", lambda v: v and all(0 < e <= 1 for e in v)),
    (("trp_strength",), "a number of at least 0", lambda v: 0 <= v < float("inf")),
    (("compare_strengths",), "numbers of at least 0", lambda v: v and all(0 <= t < float("inf") for t in v)),
    (("trp_layers",), "all, inner", _is_one_of(("all", "inner"))),
    (("vbmf_form",), "tucker, channel, spatial", _is_one_of(VBMF_FORMS)),
    (("compare_forms",), "spatial, channel or both", lambda v: v and all(f in ("spatial", "channel") for f in v)),
    (("compare_vbmf_forms",), "some of tucker, channel, spatial", lambda v: v and all(f in VBMF_FORMS for f in v)),
    (("tuning_rates",), "numbers above 0", lambda v: v and all(0 < r < float("inf") for r in v)),
    (("tuning_weight_decays",), "numbers of at least 0", lambda v: v and all(0 <= r < float("inf") for r in v)),
    (
        ("tuning_schedules",),
        "polynomial:POWER or steps:DECAY, as in polynomial:1.5,steps:0.2",
        lambda v: v and all(tuning_schedule(text) is not None for text in v),
    ),
)

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
    known = [field.name for field in fields(settings)]
    for name in overrides:
        if name not in known:
            plain = name.replace("-", "_").lower()
            usual = [_USUAL_NAMES[plain]] if plain in _USUAL_NAMES else []
            near = usual or difflib.get_close_matches(plain, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"
            raise InvalidArgumentError(f"no setting is called {name}; {hint}")
    return replace(settings, **overrides)


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
        overrides[name.strip()] = _Text(text.strip())
    return with_overrides(settings, overrides)


def from_plain(settings: AnySettings, stored: Mapping[str, Any]) -> AnySettings:
    """The settings with those replaced that were stored as JSON, where text stands for whatever has no other form."""
    known = {field.name for field in fields(settings)}
    texts = {name: _Text(value) if isinstance(value, str) else value for name, value in stored.items()}
    return with_overrides(settings, {name: value for name, value in texts.items() if name in known})


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class _Text(str):
    """A value as it was typed, to be read as what its setting is."""

    __slots__ = ()


_hints = cache(get_type_hints)  # it reads them from text every time


def _typed(settings: type, name: str, value: Any) -> Any:
    """The value as the type that its field has, or an error that says what came and what is allowed."""
    kind = _hints(settings)[name]
    try:
        return _convert(kind, value)
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InvalidArgumentError(f"{name}={_as_text(value)}; allowed: {_describe(kind)}") from None


def _convert(kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        arguments = get_args(kind)
        if isinstance(value, _Text):
            value = [_Text(part) for part in value.strip("()[]").split(",") if part.strip()]
        elif isinstance(value, str) or not isinstance(value, Iterable):
            raise TypeError
        entries = tuple(_convert(arguments[0], entry) for entry in value)
        if Ellipsis not in arguments and len(entries) != len(arguments):
            raise ValueError
        return entries
    if get_origin(kind) in (Union, types.UnionType):
        if value is None or (isinstance(value, _Text) and value.lower() == "none"):
            return None
        return _convert(next(k for k in get_args(kind) if k is not type(None)), value)
    if isinstance(value, _Text):
        if kind is bool:
            return _BOOLEANS[value.lower()]
        return _within(kind(str(value)))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise TypeError
    return _within(value)


def _within(value: Any) -> Any:
    """The value, unless it is a whole number that nothing here can count to."""
    if isinstance(value, int) and abs(value) > MOST:
        raise ValueError
    return value


def _describe(kind: Any) -> str:
    if get_origin(kind) is tuple:
        arguments = get_args(kind)
        one = {int: "int", float: "number", str: "text"}.get(arguments[0], "value")
        return f"{one}s, separated by commas" if Ellipsis in arguments else f"{len(arguments)} {one}s, as in 0.01,0.5"
    return {int: f"an int of at most {MOST:,}", float: "a number", bool: "true or false", str: "a text"}.get(
        kind, f"a {getattr(kind, '__name__', kind)}"
    )


def _as_text(value: Any) -> str:
    """A value as it is shown; of a very long number Python writes no digits."""
    try:
        text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    except ValueError:
        text = "a number of too many digits"
    return text if len(text) <= 200 else f"{text[:199]}…"
