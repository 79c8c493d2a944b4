"""What the verbs share that run a network: finding the code of its model, and a batch that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import networks
from decomposable.console import alignment as alignment
from decomposable.errors import InvalidArgumentError, ModelNeededError
from decomposable.notes import recipe_in

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_code(parser: argparse.ArgumentParser) -> None:
    """What a network takes and which code it runs, where its file does not say it."""
    parser.add_argument(
        "--input", metavar="SHAPE", help="of one sample, where the file does not know it: 3x32x32, or 128:int64"
    )
    networks.add_recipe(parser)
    parser.add_argument(
        "--model", metavar="FUNCTION", help="package.module:function, which builds the model, where FILE is not of ours"
    )


def open_network(options: argparse.Namespace) -> nn.Module:
    """What the file holds, with the model's code from wherever it is known."""
    from decomposable.methods.loading import load

    net: nn.Module
    if options.model is not None:
        if options.recipe is not None:
            raise InvalidArgumentError("--model and --recipe are two ways to name the model; allowed: one of them")
        net = load(options.file, model=_built(options.model))
    elif options.recipe is not None:
        net = load(options.file, model=networks.find_task(_info(options.file), options.recipe, None).build_model())
    else:
        try:
            net = load(options.file)
        except ModelNeededError:
            net = load(options.file, model=_of_its_recipe(options.file))
    return net


def _info(file: Path) -> Mapping[str, Any]:
    """What the maker of a file noted in it."""
    from decomposable.network.file.container import open_container

    with open_container(file) as container:
        info = container.description.get("info")
    return info if isinstance(info, Mapping) else {}


def _of_its_recipe(file: Path) -> nn.Module:
    """The model of the recipe that a file names, where that is a built-in one."""
    from decomposable import recipes

    info = _info(file)
    if recipe_in(info) not in recipes.BUILT_IN:
        raise InvalidArgumentError(
            f"--model or --recipe is needed: {file} holds weights but not the code that uses them; allowed: "
            f"--model package.module:function, or --recipe with {', '.join(recipes.BUILT_IN)} or your own"
        )
    return networks.find_task(info, None, None).build_model()


def _built(address: str) -> nn.Module:
    """What a function of the user's makes."""
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
    """A batch of the shape that was typed, by default of the type of the weights."""
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
