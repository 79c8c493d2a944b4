"""Options of the verbs that train."""

from __future__ import annotations

import argparse
from pathlib import Path

RECIPES = (
    "recipes: digits, fashion-mnist, cifar10-resnet20 (minutes to hours on a CPU),\n"
    "         cifar10-vgg15, cifar100-resnet34, imagenet-resnet50 (the paper's),\n"
    "         package.module:function (your own; docs/recipes.md)"
)


def add_what(parser: argparse.ArgumentParser, *, settings_help: str) -> None:
    """What is trained: a recipe, its data, and settings to replace."""
    parser.add_argument("recipe", metavar="RECIPE", help="a built-in name, or your own as package.module:function")
    parser.add_argument("--data", metavar="DIR", type=Path, help="where the data set is (digits needs none)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help=f"settings to replace, {settings_help}",
    )


def add_how(parser: argparse.ArgumentParser) -> None:
    """Where it computes, and how often it can be resumed."""
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto (cuda or cpu), cpu, cuda:1 …")
    parser.add_argument(
        "--checkpoint-seconds",
        metavar="N",
        type=float,
        default=60.0,
        help="from one checkpoint of a training to the next; 0 writes one after every step (default: 60)",
    )
