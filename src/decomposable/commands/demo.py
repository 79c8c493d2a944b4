"""`decomposable demo`: it runs `demonstration.py`, and shows what came out as a table, a figure and a record."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decomposable.progress import Progress, progress_line
from decomposable_edge.console import Verb, answer
from decomposable_edge.errors import MissingExtraError, how_to_install
from decomposable_edge.files import write_atomically

_LABELS = {"elastic": "elastic", "joint": "joint, the paper's", "plain": "plain"}
_METHODS = {
    "elastic": "plainly, then also at random budgets, taught by the full network: this project's way",
    "joint": "the full and a random low-rank network in every step: the paper's way",
    "plain": "as always",
}


def _options(parser: argparse.ArgumentParser) -> None:
    where = "the folder for curve.png and record.json (default: demo-out)"
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("demo-out"), help=where)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--runs", metavar="N", type=int, default=2, help="how many runs to average (default: 2)")


def _run(options: argparse.Namespace) -> None:
    with progress_line(options) as line:
        line(Progress("", "starting"))  # at once: importing PyTorch takes a while
        from decomposable.commands import demonstration

        settings = demonstration.Settings(seed=options.seed, runs=options.runs)
        for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
            if find_spec(module) is None:  # said at once, and not after training
                raise MissingExtraError.of(package, "demo")
        options.out.mkdir(parents=True, exist_ok=True)  # where it cannot be written, say so before a minute's work
        record = {"command": options.command, **demonstration.run(settings, line)}
    figure, data = save(record, options.out)
    where = f"\n{figure} shows the curve, {data} has all figures ({record['seconds']:.0f} s)."
    answer(options, record, as_text(record), where)


def as_text(record: dict[str, Any]) -> str:
    """Say what was run, and return the table."""
    settings, table, runs = record["settings"], record["table"], record["runs"]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    seconds = [f"{method} {sum(run[method]['training_seconds'] for run in runs):.0f} s" for method in _METHODS]
    lines = [
        f"A CNN with {len(settings['widths'])} convolutions, trained on {settings['train_images']} images of "
        f"handwritten digits, tested on {record['test_images']:,} others.",
        f"Trained in three ways from the same weights, on the same batches, for {record['steps']} steps each:",
        *(f"  {name:<8} {text}" for name, text in _METHODS.items()),
        "Then cut to each size by SVD and calibrated on the training images, without retraining.",
        f"Mean of {len(runs)} runs (seeds {seeds}, each with its own split)."
        if len(runs) > 1
        else f"One run (seed {seeds}).",
        f"Training took: {', '.join(seconds)}.",
        "",
        "part of        MACs           test accuracy",
        f"the MACs  (at most)  {'  '.join(f'{name:>8}' for name in _METHODS)}",
    ]
    full_macs = table[0]["joint"]["macs"]
    for row in table:
        accuracies = "  ".join(f"{row[method]['accuracy']:7.1f}%" for method in _METHODS)
        lines.append(f"{row['size']:8.2f}  {int(row['size'] * full_macs):9,}  {accuracies}")
    return "\n".join(lines)


def save(record: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write `curve.png` and `record.json` into the folder, and return where they are."""
    figure, data = folder / "curve.png", folder / "record.json"
    write_atomically(figure, draw(record))
    write_atomically(data, (json.dumps(record, indent=1) + "\n").encode())
    return figure, data


def draw(record: dict[str, Any]) -> bytes:
    """Return accuracy over size as a PNG: the mean of the runs as a line, their range as a band."""
    from decomposable.commands.figure import Curve, draw_curves

    def curve(method: str) -> Curve:
        at_size = list(zip(*([row["accuracy"] for row in run[method]["rows"]] for run in record["runs"]), strict=True))
        return Curve(
            label=_LABELS[method],
            sizes=[row["size"] for row in record["curve"]],
            accuracies=[row[method]["accuracy"] for row in record["curve"]],
            lowest=list(map(min, at_size)),
            highest=list(map(max, at_size)),
        )

    runs = len(record["runs"])
    return draw_curves(
        [curve(method) for method in _LABELS],
        title="Train once, run at any size",
        message="Cut by SVD and not retrained, a network trained for it stays accurate at small sizes.",
        caption="a CNN on handwritten digits,\n" + (f"mean and range of {runs} runs" if runs > 1 else "one run"),
        ticks=[row["size"] for row in record["table"]],
    )


VERB = Verb(
    name="demo",
    summary="train a small network in three ways, and compare them at every size (about a minute)",
    description=(
        "Train a small CNN on the handwritten digits of scikit-learn in three ways (elastic, the paper's joint\n"
        "training, plain), cut all to the same sizes and print their accuracy. Writes curve.png and record.json.\n"
        f"Needs scikit-learn and matplotlib; {how_to_install('demo')}"
    ),
    example="decomposable demo --out demo-out",
    add_options=_options,
    run=_run,
)
