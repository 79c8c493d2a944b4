"""All that `decomposable-lab exhibits all --scale paper` trains and measures, for a few steps each, on made-up images.

The networks, methods and exhibits are the paper's; the images are noise and few, there is one seed, and of each sweep
and grid the first value. So nothing is learnt: it shows that at this scale everything runs, and what it takes here.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from _common import record
from PIL import Image

from decomposable.progress import ProgressLine
from decomposable_edge.files import write_atomically
from decomposable_lab.comparison.running import How
from decomposable_lab.comparison.watching import Watchers
from decomposable_lab.exhibits import running
from decomposable_lab.exhibits.catalogue import EXHIBITS
from decomposable_lab.exhibits.scales import PAPER, Group

CLASSES = 2  # of ImageNet's thousand
FEW = {
    "epochs": 1,
    "batch_size": 8,
    "workers": 0,
    "sizes": (1.0, 0.5, 0.25),
    "calibration_images": 16,
    "tuning_epochs": 1,
}
SWEEPS = ("compare_energies", "compare_strengths", "tuning_rates", "tuning_weight_decays", "tuning_schedules")


def make_up(folder: Path, batches: int) -> None:
    """So many batches of training images, and one of test images, in the layouts of the three data sets."""
    rng = np.random.default_rng(0)
    size = FEW["batch_size"]
    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": (1, 10, batches * size // 5 + 1) for i in range(1, 6)}
    files |= {"cifar-10-batches-bin/test_batch.bin": (1, 10, size)}
    files |= {"cifar-100-binary/train.bin": (2, 100, batches * size), "cifar-100-binary/test.bin": (2, 100, size)}
    for name, (label_bytes, classes, count) in files.items():
        labels = rng.integers(0, min(classes, 20), (count, label_bytes), dtype=np.uint8)
        pixels = rng.integers(0, 256, (count, 3 * 32 * 32), dtype=np.uint8)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, np.concatenate([labels, pixels], axis=1).tobytes())
    for part, count in (("train", batches * size), ("val", size)):
        for i in range(count):
            place = folder / part / f"n{i % CLASSES:08}"
            place.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).resize((256, 256)).save(place / f"{i}.JPEG")
    _make_up_fashion(folder / "fashion-mnist", rng, batches)


def _make_up_fashion(folder: Path, rng: np.random.Generator, batches: int) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", batches * FEW["batch_size"]), ("t10k", FEW["batch_size"])):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
            content = rng.integers(0, 256 if len(shape) > 1 else 10, shape, dtype=np.uint8).tobytes()
            write_atomically(folder / f"{part}-{kind}-ubyte", head + content)


def shortened(group: Group) -> Group:
    """A few steps, one seed, and the first of every sweep."""
    own = group.all_settings
    first = {name: getattr(own, name)[:1] for name in SWEEPS}
    classes = {"classes": CLASSES} if group.recipe == "imagenet-resnet50" else {}
    return replace(group.with_settings({**FEW, **first, **classes}), seeds=(0,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exhibits", default=",".join(EXHIBITS), help="some of them (default: all)")
    parser.add_argument("--only", help="of the recipes that methods are compared on, these (default: all)")
    parser.add_argument("--batches", type=int, default=2, help="the steps of each training (default: 2)")
    parser.add_argument("--out", type=Path, help="keep the trainings here, and go on with them (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary) / "out"
        data = Path(temporary) / "data"
        make_up(data, options.batches)
        names = options.exhibits.split(",")
        only = options.only and options.only.split(",")
        order = running.Order(
            exhibits=[EXHIBITS[name] for name in names],
            scale=replace(PAPER.on(only).of_each(shortened), tuning_steps=options.batches),
            out=out,
            data=data,
            how={"device": "cpu"},
        )
        start = time.perf_counter()
        line = ProgressLine()
        watchers = Watchers(progress=line, say=line.say)
        found, failures = running.run(order, watchers=watchers, how=How(jobs=1))
        line.close()
        seconds = time.perf_counter() - start
        trainings = {group.folder: len(order.prepared(group)[0].parts) for group in order.groups}
    for name, reason in failures.items():
        print(f"{name}: {reason}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{len(found)} of {len(names)} exhibits, {sum(trainings.values())} trainings, {seconds:.0f} s, {peak:.1f} GiB"
    )
    figures = {
        "batches": options.batches,
        "exhibits": list(found),
        "only": only,
        "trainings": trainings,
        "failures": failures,
        "seconds": round(seconds, 1),
        "peak_gib": round(peak, 2),
    }
    record("paper_scale", figures)


if __name__ == "__main__":
    main()
