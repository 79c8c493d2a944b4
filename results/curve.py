"""Draw accuracy over size from run records, and print the table.

python results/curve.py results/cifar10-resnet20/joint/record.json:"trained jointly" … -o curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from decomposable.commands.figure import Curve, draw_curves
from decomposable_edge.files import write_atomically

TICKS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1)


def read(argument: str) -> tuple[str, dict]:
    path, _, label = argument.partition(":")
    return label or Path(path).parent.name, json.loads(Path(path).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="RECORD[:LABEL]")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--title", default="Train once, run at any size")
    parser.add_argument("--message", default="Cut by SVD to each size, and not retrained.")
    parser.add_argument("--caption", default="")
    options = parser.parse_args()
    runs = [read(argument) for argument in options.records]
    curves = [
        Curve(label=label, sizes=[r["size"] for r in run["sizes"]], accuracies=[r["accuracy"] for r in run["sizes"]])
        for label, run in runs
    ]
    write_atomically(
        options.out,
        draw_curves(curves, title=options.title, message=options.message, caption=options.caption, ticks=TICKS),
    )
    print("| part of the MACs | " + " | ".join(label for label, _ in runs) + " |")
    print("| --- |" + " --- |" * len(runs))
    for i, size in enumerate(curves[0].sizes):
        print(f"| {size:g} | " + " | ".join(f"{curve.accuracies[i]:.2f}%" for curve in curves) + " |")
    print(f"\n{options.out}")


if __name__ == "__main__":
    main()
