"""What `tune_` is worth: the network of a run, before and after, at some sizes, on the test images of its recipe.

    python benchmarks/tuning.py RUN --data DIR

Scales, shifts and biases are tuned with the images that the run was calibrated with, augmented, without labels.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from _common import record

import decomposable as dn
from decomposable import recipes
from decomposable.training.evaluation import accuracy
from decomposable.training.finishing import calibration_data_for
from decomposable.training.methods.flat import from_plain

SIZES = (0.5, 0.35, 0.25, 0.2, 0.15, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run of train or compare")
    parser.add_argument("--data", type=Path, help="where the data set is")
    parser.add_argument("--images", type=int, default=2000, help="training images to tune with")
    args = parser.parse_args()
    run = json.loads((args.run / "record.json").read_text())
    function = recipes.find(run["recipe"])
    settings = from_plain(recipes.default_settings(function), {**run["settings"], "calibration_images": args.images})
    task = recipes.make_task(function, args.data, settings)
    data = task.load_data()
    images = list(calibration_data_for(data, settings, task.loss, lambda line: None).calibration)
    net = dn.load(args.run / "network.safetensors", model=task.build_model())
    found = {}
    seconds = 0.0
    for name in ("before", "after"):
        if name == "after":
            start = time.perf_counter()
            net.tune_(images, sizes=SIZES, progress=lambda line: None)
            seconds = time.perf_counter() - start
        net.calibrate_(images, sizes=SIZES, progress=lambda line: None)
        found[name] = {}
        for size in SIZES:
            net.resize_(macs=size)
            found[name][f"{size:g}"] = round(accuracy(net, data), 2)
        print(name, found[name], flush=True)
    about = {"recipe": run["recipe"], "method": run["settings"]["method"], "seed": run["seed"], "images": args.images}
    record("tuning", {**about, "seconds": round(seconds, 1), **found})


if __name__ == "__main__":
    main()
