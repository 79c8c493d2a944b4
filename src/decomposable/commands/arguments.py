"""Options that several verbs take, and what they have in common beyond their type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decomposable_edge.console import alignment, parse_size, parse_sizes
from decomposable_edge.errors import InvalidArgumentError

RECIPES = (
    "recipes: digits, fashion-mnist, cifar10-resnet20, cifar10-resnet56, cifar10-vit, python-text-lm\n"
    "         (minutes to hours on a CPU),\n"
    "         cifar10-vgg15, cifar100-resnet34, imagenet-resnet50 (the paper's),\n"
    "         package.module:function (your own; docs/recipes.md)"
)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}; allowed: an int of at least 0")
    return number


ALIGN = (
    "round ranks to multiples of 8, 16 …; 1: not at all; auto, the default: to 16, 8 or 4 where that moves a rank of a "
    "wide layer little"
)
MEASURED = "; measured: what bench found to be best"
_CHECKPOINTS = "from one checkpoint of a training to the next; 0 writes one after every step (default: 60)"
_RECIPE = "what it was trained with, where the file does not name a built-in recipe; may be package.module:function"
_SHARED: dict[str, dict[str, Any]] = {
    "file": {"metavar": "FILE", "type": Path, "help": "a network.safetensors, of any training"},
    "recipe": {"metavar": "RECIPE", "help": "a built-in name, or your own as package.module:function"},
    "--align": {"metavar": "N", "type": alignment},
    "--checkpoint-seconds": {"metavar": "N", "type": float, "default": 60.0, "help": _CHECKPOINTS},
    "--data": {"metavar": "DIR", "type": Path, "help": "where the data set is (digits and python-text-lm need none)"},
    "--device": {"metavar": "NAME", "default": "auto", "help": "auto (cuda or cpu), cpu, cuda:1 …"},
    "--force": {"action": "store_true", "help": "replace OUT where it exists"},
    "--macs": {"metavar": "SIZE", "help": "at most this many multiply-accumulates: 0.25, 25%% or 45M"},
    "--params": {"metavar": "SIZE", "help": "at most this many parameters: 0.25, 25%% or 1.2M"},
    "--ratio": {"metavar": "Z", "help": "this part of all bases: the paper's Z"},
    "--recipe": {"metavar": "RECIPE", "help": _RECIPE},
    "--set": {"metavar": "KEY=VALUE", "nargs": "+", "action": "extend", "default": []},
    "--workers": {"metavar": "N", "type": _count, "default": 0, "help": "processes that read data (default: 0)"},
}


def add(parser: argparse.ArgumentParser, *names: str, **how: Any) -> None:
    """Add these of the options that verbs share; `how` is what this verb says otherwise."""
    for name in names:
        parser.add_argument(name, **(_SHARED[name] | how))


def taken(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return these of the options, for a function that calls them the same."""
    return {name: getattr(options, name) for name in names}


def sizes_asked(options: argparse.Namespace) -> dict[str, float]:
    """Return the sizes that --macs, --params and --ratio give, as `resize_` takes them."""
    typed = taken(options, "macs", "params", "ratio")
    return {name: parse_size(f"--{name}", text) for name, text in typed.items() if text is not None}


def sizes_listed(options: argparse.Namespace) -> list[float] | None:
    """Return what --sizes lists; None where it was not given."""
    return None if options.sizes is None else [size for _, size in parse_sizes("--sizes", options.sizes)]


def checked_out(options: argparse.Namespace, endings: Sequence[str]) -> Path:
    """Return the file to write (`-o`); refuse, before any work, one that cannot be written."""
    return checked_file("-o", options.out, endings, options)


def checked_file(option: str, path: Path, endings: Sequence[str], options: argparse.Namespace) -> Path:
    """Return a file to write, in the same way."""
    if path.suffix not in endings:
        raise InvalidArgumentError(f"{option} {path}: got the ending {path.suffix!r}; allowed: {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"{option} {path}: there is no folder {path.parent}; allowed: one that exists")
    if path.is_dir() or (path.exists() and not options.force):
        raise InvalidArgumentError(f"{option} {path}: it exists; allowed: another name, or --force to replace it")
    return path
