"""Draw runs of several methods and seeds as one comparison, and print the table: mean and range over the seeds.

cd results/cifar10-vit; python ../compared.py *-?/record.json cut-?.json -o comparison.png

Of a text it is the perplexity, else the accuracy. What `decomposable cut --json` printed is a record, too: of a network
that was trained normally, cut by data.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decomposable_edge.files import write_atomically
from decomposable_lab.commands.compare import as_text
from decomposable_lab.comparison.figure import draw
from decomposable_lab.comparison.results import mean_over_seeds


def method_of(record: dict[str, Any]) -> str:
    """Who made it; a cut is of a network that was trained normally."""
    return "normal learning, cut by data" if "cut" in record else str(record["settings"]["method"])


def content_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What `comparison.json` of these runs would be."""
    runs: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        runs[method_of(record)].append(record["sizes"])
    methods = {}
    for name, rows in runs.items():
        points = [asdict(point) for point in mean_over_seeds(rows, name)]
        methods[name] = {"shown": {"label": name, "points": points}, "curves": {name: points}}
    return {
        "recipe": records[0]["recipe"],
        "seeds": sorted({record["seed"] for record in records}),
        "sizes": [row["size"] for row in records[0]["sizes"]],
        "methods": methods,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    records = [json.loads(path.read_text()) for path in options.records]
    content = content_of(records)
    write_atomically(options.out, draw(content))
    print(as_text(content))
    for record in sorted(records, key=lambda record: (method_of(record), record["seed"])):
        print(method_of(record), record["seed"], f"{record.get('training_seconds', 0):.0f} s,", end=" ")
        print(", ".join(f"{r['size']:g}: {r.get('perplexity') or r['accuracy']:.3f}" for r in record["sizes"]))


if __name__ == "__main__":
    main()
