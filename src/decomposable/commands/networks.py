"""What the verbs that take a network file share: reading it, the code of its model, and the table of its sizes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable_edge.console import as_table
from decomposable_edge.errors import ArtifactError, InvalidArgumentError, MissingExtraError, ModelNeededError
from decomposable_edge.notes import recipe_in
from decomposable_edge.text import printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from decomposable.network.file.contents import Artifact
    from decomposable.recipes import Task
    from decomposable.recipes.settings import Settings
    from decomposable.training.evaluation import Row

HEADER = ("size", "MACs", "of all", "parameters", "of all", "ranks")


def info_of(file: Path) -> Mapping[str, Any]:
    """Return what the maker of a network file noted in it."""
    from decomposable.network.file.container import open_container
    from decomposable.network.file.parsing import kind_of

    with open_container(file) as container:
        kind_of(file, container.description)
        return info_in(container.description)


def info_in(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the note of its maker from what a file says of itself."""
    info = description.get("info")
    return info if isinstance(info, Mapping) else {}


def first_complaint(contents: Artifact, sizes: Sequence[float]) -> str | None:
    """Return what to say of the first of these sizes whose statistics are not known."""
    plans = [contents.of_size(size) for size in sizes if contents.selector.smallest_size <= size <= 1]
    return next((text for plan in plans if (text := contents.calibration_warning(plan)) is not None), None)


def warn_of(verb: str, calibration_warning: str | None) -> None:
    """Say what statistics are not known, where that is so."""
    if calibration_warning is not None:
        print(f"decomposable {verb}: warning: {printable(calibration_warning)}", file=sys.stderr)


def table(rows: Sequence[tuple[str, Row]], measured: str = "test accuracy") -> str:
    """Return sizes as they were asked for, and what they come to; of a text its perplexity, too."""
    is_text = any(row.perplexity is not None for _, row in rows)
    lines = [
        (
            asked,
            _cell("{:,}", row.macs),
            _cell("{:.3f}", row.macs_fraction),
            _cell("{:,}", row.params),
            _cell("{:.3f}", row.params_fraction),
            _cell("{0[0]}-{0[1]}", row.ranks),
            _cell("{:.2f}%", row.accuracy),
            *([_cell("{:.3f}", row.perplexity)] if is_text else []),
        )
        for asked, row in rows
    ]
    return as_table((*HEADER, measured, *(["perplexity"] if is_text else [])), lines)


def _cell(form: str, value: object) -> str:
    return "" if value is None else form.format(value)


def write_figure(path: Path, drawn: Callable[[], bytes], again: str) -> str:
    """Write a figure, if matplotlib is installed, and return what to say about it."""
    from decomposable_edge.files import write_atomically

    try:
        png = drawn()
    except ImportError:
        return f"No figure: {MissingExtraError.of('matplotlib', 'plot')}; then run the same command again{again}"
    write_atomically(path, png)
    return f"The figure is {path}"


def draw_sizes(
    path: Path,
    curves: Mapping[str, Sequence[Row]],
    *,
    title: str,
    message: str,
    again: str,
    measured: str = "test accuracy",
) -> str:
    """Draw accuracy (of a text its perplexity) over size, a line for each curve, and return what to say about it."""
    from decomposable.commands.figure import AXES, Curve, draw_curves

    is_text = has_perplexity([row for rows in curves.values() for row in rows])
    how: dict[str, Any] = {"measured": AXES["perplexity"], "unit": ""} if is_text else {"measured": measured}
    made = []
    for name, rows in curves.items():
        values = {row.macs_fraction: row.perplexity if is_text else row.accuracy for row in rows}
        points = [(size, value) for size, value in values.items() if size and value is not None]
        if len(points) > 1:
            sizes, found = zip(*sorted(points, reverse=True), strict=True)
            made.append(Curve(label=name, sizes=sizes, accuracies=found))
    if not made:
        return "No figure: fewer than two sizes were measured"
    return write_figure(path, lambda: draw_curves(made, title=title, message=message, caption="", **how), again)


def has_perplexity(rows: Sequence[Row]) -> bool:
    """Return whether these are sizes of a network for a text, which its perplexity judges."""
    return bool(rows) and all(row.perplexity is not None for row in rows)


def find_task(info: Mapping[str, Any], recipe: str | None, data: Path | None) -> tuple[Task, Settings]:
    """Return the model and the data of a network file, and the settings that it was trained with."""
    from decomposable import recipes
    from decomposable.training.methods.flat import from_plain

    stored, name = recipe_in(info), recipe or _built_in_recipe(info)
    if name is None:
        said = f"says {stored!r:.80}, which is not a built-in recipe" if stored is not None else "names none"
        raise InvalidArgumentError(
            f"--recipe is needed: the file {said}; allowed: {', '.join(recipes.BUILT_IN)} or your own"
        )
    function = recipes.find(name)
    settings = recipes.default_settings(function)
    known = info.get("settings")
    if name == stored and isinstance(known, Mapping):
        try:
            settings = from_plain(settings, known)
        except InvalidArgumentError as error:  # nobody has typed them
            raise ArtifactError(f"the file's settings cannot be: {error}") from error
    return recipes.make_task(function, data, settings), settings


def _built_in_recipe(info: Mapping[str, Any]) -> str | None:
    """Return the recipe that a file names, if it is built in: to import any other would run a stranger's code."""
    from decomposable.recipes import BUILT_IN

    stored = recipe_in(info)
    return stored if stored in BUILT_IN else None


def needs_data(info: Mapping[str, Any], recipe: str | None) -> bool:
    """Return whether measuring takes a folder of data, as far as one can know."""
    from decomposable import recipes

    name = recipe or _built_in_recipe(info)
    return name is None or recipes.needs_data(recipes.find(name))


def open_network(options: argparse.Namespace) -> nn.Module:
    """Return what the file holds, with the code of --model, of --recipe, or that which the file itself knows."""
    if options.model is not None and options.recipe is not None:
        raise InvalidArgumentError("--model and --recipe are two ways to name the model; allowed: one of them")
    is_named = options.model is not None or options.recipe is not None
    build = (lambda: _of_recipe(options)) if options.model is None else (lambda: _built(options.model))
    net: nn.Module = loaded(options.file, build, only=is_named)
    return net


def loaded(file: Path, build: Callable[[], nn.Module], *, only: bool = False) -> Any:
    """Load a network, with the model that its file builds; with that of `build` where it builds none, or `only` so."""
    from decomposable.network.loading import load

    try:
        return load(file, model=build() if only else None)
    except ModelNeededError:
        return load(file, model=build())


def _of_recipe(options: argparse.Namespace) -> nn.Module:
    """Return the model of the recipe that was asked for, or else of the built-in one that the file names."""
    from decomposable.recipes import BUILT_IN

    info = info_of(options.file)
    if options.recipe is None and _built_in_recipe(info) is None:
        raise InvalidArgumentError(
            f"--model or --recipe is needed: {options.file} holds weights but not the code that uses them; allowed: "
            f"--model package.module:function, or --recipe with {', '.join(BUILT_IN)} or your own"
        )
    return find_task(info, options.recipe, None)[0].build_model()


def _built(address: str) -> nn.Module:
    """Return what a function of the user's makes."""
    from torch import nn

    from decomposable import recipes

    if ":" not in address:
        raise InvalidArgumentError(f"--model {address}: not a module and a function; allowed: package.module:function")
    function: Any = recipes.imported(address, option="--model")
    try:
        model = function()
    except Exception as error:  # code of somebody else
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
        raise InvalidArgumentError(f"--model {address}: it cannot be called without arguments ({reason})") from error
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"--model {address}: it returned {type(model).__name__}; allowed: a torch.nn.Module")
    return model


def example(text: str, net: nn.Module) -> Tensor:
    """Return a batch of the shape that was typed, by default of the type of the weights."""
    import torch

    from decomposable.export.quiet import reason
    from decomposable.network.calls import InputSpec

    shape, _, name = text.partition(":")
    sizes = [int(size) if size.isdecimal() and len(size) < 9 else 0 for size in shape.split("x")]
    weight = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros(0))
    dtype = getattr(torch, name, None) if name else weight.dtype
    if not all(0 < size < 1 << 24 for size in sizes) or not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(f"--input {text}: not a shape; allowed: as in 3x32x32, or with a type, 128:int64")
    try:
        return InputSpec(shape=tuple(sizes), dtype=str(dtype).removeprefix("torch.")).example(2)
    except Exception as error:  # too large, or of a type that has no ordinary numbers
        raise InvalidArgumentError(f"--input {text}: a batch cannot be made ({reason(error)})") from error
