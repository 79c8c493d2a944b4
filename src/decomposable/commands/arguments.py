"""Options that several verbs take, and what they have in common beyond their type."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from decomposable.console import parse_size
from decomposable.errors import InvalidArgumentError

RECIPES = (
    "recipes: digits, fashion-mnist, cifar10-resnet20 (minutes to hours on a CPU),\n"
    "         cifar10-vgg15, cifar100-resnet34, imagenet-resnet50 (the paper's),\n"
    "         package.module:function (your own; docs/recipes.md)"
)


def add_file(parser: argparse.ArgumentParser) -> None:
    """The network file, as the first argument."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a network.safetensors, of any training")


def add_data(parser: argparse.ArgumentParser) -> None:
    """Where the images are."""
    parser.add_argument("--data", metavar="DIR", type=Path, help="where the data set is (digits needs none)")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Which model and data, where the file does not say it."""
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="what it was trained with, where the file does not name a built-in recipe; may be package.module:function",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where it computes."""
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto (cuda or cpu), cpu, cuda:1 …")


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Where accuracies are measured."""
    add_device(parser)
    parser.add_argument("--workers", metavar="N", type=_count, default=0, help="processes that read data (default: 0)")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}; allowed: an int of at least 0")
    return number


def add_what_to_train(parser: argparse.ArgumentParser, *, settings_help: str) -> None:
    """A recipe, its data, and settings to replace."""
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name, or your own as package.module:function")
    add_data(parser)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=f"settings to replace, {settings_help}",
    )


def add_how_to_train(parser: argparse.ArgumentParser) -> None:
    """Where it computes, and how often it can be resumed."""
    add_device(parser)
    parser.add_argument(
        "--checkpoint-seconds",
        metavar="N",
        type=float,
        default=60.0,
        help="from one checkpoint of a training to the next; 0 writes one after every step (default: 60)",
    )


def add_size(parser: argparse.ArgumentParser) -> None:
    """The three ways to ask for one size."""
    parser.add_argument("--macs", metavar="SIZE", help="at most this many multiply-accumulates: 0.25, 25%% or 45M")
    parser.add_argument("--params", metavar="SIZE", help="at most this many parameters: 0.25, 25%% or 1.2M")
    parser.add_argument("--ratio", metavar="Z", help="this part of all bases: the paper's Z")


def sizes_asked(options: argparse.Namespace) -> dict[str, float]:
    """Those of --macs, --params and --ratio that were given, as `resize_` takes them."""
    typed = {name: getattr(options, name) for name in ("macs", "params", "ratio")}
    return {name: parse_size(f"--{name}", text) for name, text in typed.items() if text is not None}


def add_force(parser: argparse.ArgumentParser) -> None:
    """Leave to replace a file."""
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")


def checked_out(options: argparse.Namespace, endings: Sequence[str]) -> Path:
    """The file to write (`-o`), which is refused before any work where it can be seen that it cannot be."""
    out: Path = options.out
    if out.suffix not in endings:
        raise InvalidArgumentError(f"-o {out}: got the ending {out.suffix!r}; allowed: {' or '.join(endings)}")
    if not out.parent.is_dir():
        raise InvalidArgumentError(f"-o {out}: there is no folder {out.parent}; allowed: one that exists")
    if out.is_dir() or (out.exists() and not options.force):
        raise InvalidArgumentError(f"-o {out}: it exists; allowed: another name, or --force to replace it")
    return out
