"""What the verbs that take a network file share: reading it, and finding the recipe that it was trained with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.console import as_table, parse_size
from decomposable.errors import ArtifactError, InvalidArgumentError
from decomposable.notes import measured_rows, recipe_in
from decomposable.text import printable

if TYPE_CHECKING:
    from decomposable.methods.settings import Settings
    from decomposable.network.file.contents import Artifact
    from decomposable.recipes import Task
    from decomposable.training.evaluation import Row

HEADER = ("size", "MACs", "of all", "parameters", "of all", "ranks", "test accuracy")


def add_file(parser: argparse.ArgumentParser) -> None:
    """The network file, as the first argument."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a network.safetensors, of any training")


def add_computing(parser: argparse.ArgumentParser) -> None:
    """Where accuracies are measured."""
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto (cuda or cpu), cpu, cuda:1 …")
    parser.add_argument("--workers", metavar="N", type=_count, default=0, help="processes that read data (default: 0)")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}; allowed: an int of at least 0")
    return number


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Which model and data, where the file does not say it."""
    parser.add_argument(
        "--recipe",
        metavar="RECIPE",
        help="what it was trained with, where the file does not name a built-in recipe; may be package.module:function",
    )


def warn_of(verb: str, complaint: str | None) -> None:
    """Say what statistics are not known, where that is so."""
    if complaint is not None:
        print(f"decomposable {verb}: warning: {printable(complaint)}", file=sys.stderr)


def first_complaint(contents: Artifact, sizes: Sequence[float]) -> str | None:
    """What to say of the first of these sizes whose statistics are not known."""
    plans = [contents.of_size(size) for size in sizes if contents.selector.smallest_size <= size <= 1]
    return next((text for plan in plans if (text := contents.complaint(plan)) is not None), None)


def sized_description(path: Path) -> dict[str, Any] | None:
    """What a file says of itself that holds the sizes of a method which does not decompose; None for other files."""
    from decomposable.network.file.container import open_container
    from decomposable.network.file.parsing import kind_of

    with open_container(path) as container:
        return container.description if kind_of(path, container.description) == "sized" else None


def sized_rows(path: Path, description: Mapping[str, Any]) -> list[tuple[str, Row]]:
    """The sizes of such a file under their own names, with the accuracies that it knows."""
    from decomposable.network.sized import sizes_of
    from decomposable.training.evaluation import Row

    known = {
        (row["macs"], row["params"]): accuracy
        for row, accuracy in measured_rows(description.get("info"))
        if type(row.get("macs")) is type(row.get("params")) is int
    }
    return [
        (size.name, Row.of(size.macs_fraction, size, known.get((size.macs, size.params))))
        for size in sizes_of(path, description)
    ]


def find_task(info: Mapping[str, Any], recipe: str | None, data: Path | None) -> Task:
    """The model and the data of a network file."""
    return task_and_settings(info, recipe, data)[0]


def task_and_settings(info: Mapping[str, Any], recipe: str | None, data: Path | None) -> tuple[Task, Settings]:
    """The model and the data of a network file, and the settings that it was trained with.

    A file may come from anywhere, so that only the name of a built-in recipe is taken from it: importing what a file
    names would run a stranger's choice of code.
    """
    from decomposable import recipes
    from decomposable.methods.settings import from_plain

    stored = recipe_in(info)
    name = recipe or stored
    if recipe is None and stored not in recipes.BUILT_IN:
        said = f"says {stored!r:.80}, which is not a built-in recipe" if stored is not None else "names none"
        raise InvalidArgumentError(
            f"--recipe is needed: the file {said}; allowed: {', '.join(recipes.BUILT_IN)} or your own"
        )
    assert isinstance(name, str)
    function = recipes.find(name)
    settings = recipes.default_settings(function)
    known = info.get("settings")
    if name == stored and isinstance(known, Mapping):
        try:
            settings = from_plain(settings, known)
        except InvalidArgumentError as error:  # nobody has typed them
            raise ArtifactError(f"the file's settings cannot be: {error}") from error
    return recipes.make_task(function, data, settings), settings


def needs_data(info: Mapping[str, Any], recipe: str | None) -> bool:
    """Whether measuring takes a folder of data, as far as one can know."""
    from decomposable import recipes

    stored = recipe_in(info)
    name = recipe or (stored if stored in recipes.BUILT_IN else None)  # a stranger's choice of code is not imported
    return name is None or recipes.needs_data(recipes.find(name))


def size_asked(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Whichever of --macs, --params and --ratio was given: as it was typed, and as `artifact.read` takes it."""
    given = {name: getattr(options, name) for name in ("macs", "params", "ratio") if getattr(options, name) is not None}
    if len(given) != 1:
        came = " and ".join(f"--{name}" for name in given) or "none"
        raise InvalidArgumentError(f"a size is given by exactly one of --macs, --params and --ratio; got {came}")
    [(name, text)] = given.items()
    return f"{name}={text}", {name: parse_size(f"--{name}", text)}


def add_size(parser: argparse.ArgumentParser) -> None:
    """The three ways to ask for one size."""
    parser.add_argument("--macs", metavar="SIZE", help="at most this many multiply-accumulates: 0.25, 25%% or 45M")
    parser.add_argument("--params", metavar="SIZE", help="at most this many parameters: 0.25, 25%% or 1.2M")
    parser.add_argument("--ratio", metavar="Z", help="this part of all bases: the paper's Z")


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Sizes as they were asked for, and what they come to."""
    lines = [
        (
            asked,
            "" if row.macs is None else f"{row.macs:,}",
            "" if row.macs_fraction is None else f"{row.macs_fraction:.3f}",
            f"{row.params:,}",
            f"{row.params_fraction:.3f}",
            "" if row.ranks is None else f"{row.ranks[0]}-{row.ranks[1]}",
            "" if row.accuracy is None else f"{row.accuracy:.2f}%",
        )
        for asked, row in rows
    ]
    return as_table(HEADER, lines)
