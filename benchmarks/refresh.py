"""Does decomposing less often cost accuracy? The same training with several values of `refresh`, over several seeds.

The trainings are kept in --work, a folder REFRESH-SEED each, and one that is there is not made again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from _common import record

from decomposable import recipes
from decomposable.recipes.settings import Settings
from decomposable.training import experiment
from decomposable.training.methods.flat import from_text
from decomposable.training.runs import plain_settings


def trained(args: argparse.Namespace, refresh: int, seed: int) -> dict:
    folder = args.work / f"{refresh}-{seed}"
    settings = from_text(recipes.default_settings(recipes.find(args.recipe)), [*args.set, f"refresh={refresh}"])
    if (folder / "record.json").exists():
        return of_these_settings(json.loads((folder / "record.json").read_text()), replace(settings, seed=seed), args)
    print(f"training with refresh={refresh}, seed={seed}", flush=True)
    job = experiment.prepare(
        args.recipe, out=folder, data=args.data, settings=settings, overrides={"seed": seed}, resume=True
    )
    return experiment.run(job)


def of_these_settings(record: dict, settings: Settings, args: argparse.Namespace) -> dict:
    """The record, if it is of this training; settings that did not exist when it was made had no effect on it."""
    ours = plain_settings(settings)
    wrong = [key for key, value in record["settings"].items() if key in ours and ours[key] != value]
    if wrong or record["recipe"] != args.recipe:
        raise SystemExit(
            f"{args.work}: it holds trainings with another {(wrong or ['recipe'])[0]}; choose another --work"
        )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--refresh", default="1,8,32,128")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--work", type=Path, required=True, help="where the trainings are kept")
    args = parser.parse_args()
    values, seeds = ([int(part) for part in text.split(",")] for text in (args.refresh, args.seeds))
    runs = {r: [trained(args, r, seed) for seed in seeds] for r in values}
    sizes = [row["size"] for row in runs[values[0]][0]["sizes"]]
    figures: dict = {"recipe": args.recipe, "seeds": seeds, "sizes": sizes, "accuracy": {}, "against_1": {}}
    print(f"{'refresh':>8}  " + "  ".join(f"{size:>12g}" for size in sizes))
    for r in values:
        columns = list(zip(*([row["accuracy"] for row in run["sizes"]] for run in runs[r]), strict=True))
        figures["accuracy"][r] = columns
        spread = [stdev(column) if len(column) > 1 else 0.0 for column in columns]
        cells = [f"{fmean(column):6.2f} ±{s:4.2f}" for column, s in zip(columns, spread, strict=True)]
        print(f"{r:>8}  " + "  ".join(f"{cell:>12}" for cell in cells))
    base = figures["accuracy"][values[0]]
    for r in values[1:]:
        # The same seed has the same initial weights, batches and values of Z, so that the differences are paired.
        differences = [
            fmean(a - b for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in zip(figures["accuracy"][r], base, strict=True)
        ]
        figures["against_1"][r] = differences
        print(f"{r:>4} - {values[0]}  " + "  ".join(f"{difference:+12.2f}" for difference in differences))
    figures["commits"] = sorted({c for each in runs.values() for run in each for c in run["training_commits"]})
    figures["settings"] = args.set
    record("refresh", figures)


if __name__ == "__main__":
    main()
