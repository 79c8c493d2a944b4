"""`decomposable cut`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from decomposable.commands import arguments, networks
from decomposable.progress import Progress, progress_line
from decomposable_edge.console import Verb, answer, showing_warnings
from decomposable_edge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from decomposable.recipes.settings import Settings
    from decomposable.training.cutting import CutResult

CRITERIA = {
    "loss": "the answers of the network, by its logits (the default where it gives logits)",
    "output": "what the network gives, such as an embedding (the default elsewhere)",
    "singular_value": "the weights alone, as energy and uniform",
}


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add(parser, "recipe", "--data")
    add("--init", metavar="FILE", type=Path, required=True, help="the trained weights (.safetensors, .pt, .pth)")
    add("-o", "--out", metavar="OUT", type=Path, required=True, help="the file to write, a .safetensors")
    criteria = "; ".join(f"{name}: {text}" for name, text in CRITERIA.items())
    add("--criterion", metavar="NAME", help=f"what a cut must not lose: {criteria}")
    images = "training images to measure with, without labels, in whole batches (default: 2000)"
    add("--images", metavar="N", type=int, help=images)
    add("--sizes", metavar="LIST", help="MAC budgets to show, as in 1,0.5,25%% (default: the recipe's)")
    agreement = "show how often a size says what the full network says: for images whose labels nobody knows"
    add("--agreement", action="store_true", help=agreement)
    add("--tune", action="store_true", help="train scales, shifts and biases of their own for some sizes (minutes)")
    add("--no-onnx", action="store_true", help="leave out the graph that decomposable_edge needs")
    add("--figure", metavar="PNG", type=Path, help="the figure of the table (default: OUT with the ending .png)")
    arguments.add(parser, "--set", help="settings to replace, such as form=channel seed=1 (train --dry-run lists them)")
    arguments.add(parser, "--force", "--device")


def _run(options: argparse.Namespace) -> None:
    with progress_line(options) as line:
        line(Progress("", "reading the recipe"))  # at once: importing PyTorch takes a while
        from decomposable import recipes
        from decomposable.training.cutting import cut
        from decomposable.training.devices import choose_device, make_deterministic

        out = arguments.checked_out(options, [".safetensors"])
        figure = arguments.checked_file("--figure", options.figure or out.with_suffix(".png"), [".png"], options)
        settings = _settings(options)
        make_deterministic()
        task = recipes.make_task(recipes.find(options.recipe), options.data, settings)
        with showing_warnings("decomposable cut"):
            made = cut(
                options.recipe,
                task,
                settings,
                asked=arguments.sizes_listed(options) or (),
                device=choose_device(options.device),
                progress=line,
                **arguments.taken(options, "init", "criterion", "tune", "agreement"),
            )
        line(Progress("writing the file"))
        report = made.net.save(out, made.info, onnx=False) if options.no_onnx else made.net.save(out, made.info)
        drawn = _draw(figure, options.recipe, made)
    compared = f"{made.info['test_images']:,} test images"
    how = f"how often a size says what the full network says of {compared}" if made.is_agreement else compared
    answer(
        options,
        {"file": str(out), "figure": str(figure) if figure.exists() else None, **made.info},
        networks.table(
            [(f"{row.size:g}", row) for row in made.rows], "agreement" if made.is_agreement else "test accuracy"
        ),
        f"\nNothing was trained{', but scales, shifts and biases (--tune)' if options.tune else ''}: "
        f"{_bases(made)}; {how}",
        f"Every size is in {out}; see: decomposable sizes {out}",
        None if options.no_onnx or report.without_onnx is None else f"A device cannot open it: {report.without_onnx}",
        drawn,
    )


def _settings(options: argparse.Namespace) -> Settings:
    """Return the settings of the recipe with what was asked for; refuse what has no effect on a cut."""
    from decomposable import recipes
    from decomposable.training.cutting import IMAGES, WAYS
    from decomposable.training.methods.flat import from_text, with_overrides

    if options.criterion is not None and options.criterion not in WAYS:
        raise InvalidArgumentError(f"--criterion {options.criterion}; allowed: {', '.join(WAYS)}")
    settings = from_text(recipes.default_settings(recipes.find(options.recipe)), options.set)
    named = {assignment.partition("=")[0].strip() for assignment in options.set}
    for name, instead in (("criterion", "--criterion"), ("method", "none: nothing is trained")):
        if name in named:
            raise InvalidArgumentError(f"--set {name}: it has no effect on a cut; allowed: {instead}")
    if options.images is not None and "calibration_images" in named:
        raise InvalidArgumentError("--images and --set calibration_images: got both; allowed: one of them")
    given = settings.calibration_images if "calibration_images" in named else IMAGES
    images = given if options.images is None else options.images
    if images < 2:
        raise InvalidArgumentError(f"--images {images}; allowed: an int of at least 2")
    sizes = arguments.sizes_listed(options)
    return with_overrides(settings, {"calibration_images": images} | ({"sizes": tuple(sizes)} if sizes else {}))


def _bases(made: CutResult) -> str:
    """Say where the bases come from, and the statistics."""
    criterion, images = made.info["cut"]["criterion"], f"{made.images:,} images without labels"
    report, why = made.net.cut_report, ""
    if report is not None and report.sizes and report.kept != "weights":
        return f"bases by {criterion}, from {images}"
    if report is not None:
        criterion = "singular_value"
        few = "too few batches came to judge a cut by data"
        why = f", since {'data did no better on images that were kept out' if report.sizes else few}"
    return f"bases by {criterion}{why}; statistics from {images}"


def _draw(path: Path, recipe: str, made: CutResult) -> str:
    return networks.draw_sizes(
        path,
        {"tuned" if made.info["cut"]["tuned"] else "as cut": made.rows},
        title=f"{recipe}: cut without training",
        message=_bases(made),
        again=" with --force",
        measured="agreement with the full network" if made.is_agreement else "test accuracy",
    )


VERB = Verb(
    name="cut",
    summary="make a trained network one of any size, without training it",
    description=(
        "Take trained weights, and find with a few images, without their labels, which bases of which layer lose the\n"
        "least; compute batch normalisation statistics for a grid of sizes, and measure some of them on the test\n"
        "images, with labels or, as agreement with the full network, without (--agreement).\n"
        "A network that is trained to be cut loses less: decomposable train.\n\n" + arguments.RECIPES
    ),
    example=(
        "decomposable cut cifar10-resnet20 --data DIR --init resnet20.pt -o resnet20.safetensors\n"
        "  decomposable cut my_package.recipes:mine --init weights.pt --images 500 --tune -o mine.safetensors"
    ),
    add_options=_options,
    run=_run,
)
