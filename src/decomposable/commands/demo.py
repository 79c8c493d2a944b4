"""`decomposable demo`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from decomposable.console import Verb, progress_line
from decomposable.errors import how_to_install
from decomposable.progress import Progress, ProgressLine


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("demo-out"),
        help="the folder for curve.png and record.json (default: demo-out)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--runs", metavar="N", type=int, default=2, help="how many runs to average (default: 2)")


def _run(options: argparse.Namespace) -> None:
    with progress_line(options) as line:
        line(Progress("", "starting"))  # at once: importing PyTorch takes a while
        _demonstrate(options, line)


def _demonstrate(options: argparse.Namespace, line: ProgressLine) -> None:
    from decomposable.commands import demonstration as demo

    settings = demo.Settings(seed=options.seed, runs=options.runs)
    demo.require_extra()
    options.out.mkdir(parents=True, exist_ok=True)  # where it cannot be written, say so before a minute's work
    record = {"command": options.command, **demo.run(settings, line)}
    line.close()
    figure, data = demo.save(record, options.out)
    if options.json:
        print(json.dumps(record))
        return
    print(demo.as_text(record))
    print(f"\n{figure} shows the curve, {data} has all figures ({record['seconds']:.0f} s).")


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
