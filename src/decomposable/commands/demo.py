"""`decomposable demo`: it runs `demonstration.py`, and shows what came out as a table, a figure and a record."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decomposable.console import Verb, answer, progress_line
from decomposable.errors import MissingExtraError, how_to_install
from decomposable.files import write_atomically
from decomposable.progress import Progress


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
    """What was run, and the table."""
    settings, table = record["settings"], record["table"]
    seconds = {m: sum(run[m]["training_seconds"] for run in record["runs"]) for m in ("joint", "plain")}
    runs = len(record["runs"])
    seeds = ", ".join(str(run["seed"]) for run in record["runs"])
    lines = [
        f"A CNN with {len(settings['widths'])} convolutions, trained on {settings['train_images']} images of "
        f"handwritten digits, tested on {record['test_images']:,} others.",
        f"Trained jointly and plainly: the same initial weights, batches and {record['steps']} steps "
        f"({seconds['joint']:.0f} s and {seconds['plain']:.0f} s).",
        "Then cut to each size by SVD and calibrated on the training images, without retraining.",
        f"Mean of {runs} runs (seeds {seeds}, each with its own split)." if runs > 1 else f"One run (seed {seeds}).",
        "",
        "part of        MACs       parameters       test accuracy",
        "the MACs  (at most)     joint    plain    joint    plain   difference",
    ]
    full_macs = table[0]["joint"]["macs"]
    for row in table:
        joint, plain = row["joint"], row["plain"]
        lines.append(
            f"{row['size']:8.2f}  {int(row['size'] * full_macs):9,}   {joint['params']:7,.0f}  {plain['params']:7,.0f}"
            f"   {joint['accuracy']:5.1f}%   {plain['accuracy']:5.1f}%   {joint['accuracy'] - plain['accuracy']:+10.1f}"
        )
    return "\n".join(lines)


def save(record: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write `curve.png` and `record.json` into the folder; where they went."""
    figure, data = folder / "curve.png", folder / "record.json"
    write_atomically(figure, draw(record))
    write_atomically(data, (json.dumps(record, indent=1) + "\n").encode())
    return figure, data


def draw(record: dict[str, Any]) -> bytes:
    """The accuracy of both networks over their size, as a PNG: the mean as a line, the range of the runs as a band."""
    from decomposable.comparison.figure import Curve, draw_curves

    def curve(method: str) -> Curve:
        at_size = list(zip(*([row["accuracy"] for row in run[method]["rows"]] for run in record["runs"]), strict=True))
        return Curve(
            label=f"trained {method}ly",
            sizes=[row["size"] for row in record["curve"]],
            accuracies=[row[method]["accuracy"] for row in record["curve"]],
            lowest=list(map(min, at_size)),
            highest=list(map(max, at_size)),
        )

    runs = len(record["runs"])
    return draw_curves(
        [curve("joint"), curve("plain")],
        title="Train once, run at any size",
        message="Cut by SVD and not retrained, the jointly trained network stays accurate at small sizes.",
        caption="a CNN on handwritten digits,\n" + (f"mean and range of {runs} runs" if runs > 1 else "one run"),
        ticks=[row["size"] for row in record["table"]],
    )


VERB = Verb(
    name="demo",
    summary="train a small network jointly and plainly, and compare them at every size (about a minute)",
    description=(
        "Train a small CNN on the handwritten digits of scikit-learn, once with the joint objective and once\n"
        "plainly, cut both to the same sizes and print their accuracy. Writes curve.png and record.json.\n"
        f"Needs scikit-learn and matplotlib; {how_to_install('demo')}"
    ),
    example="decomposable demo --out demo-out",
    add_options=_options,
    run=_run,
)
