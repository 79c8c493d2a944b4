"""What `tune_` gains: the accuracy of a ResNet-20 on CIFAR-10 at some sizes, calibrated, and tuned as well.

    python benchmarks/tuning.py --data cifar-10-batches-bin --weights resnet20.th
    python benchmarks/tuning.py --data cifar-10-batches-bin --network joint/net.safetensors --test

Both networks see the same training images, augmented; those that accuracy is measured on are others: 5,000 training
images that are held out, or with --test the test set.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _cifar import accuracy, add_options, augment, load_cifar10, pretrained_resnet20
from _common import record
from torch import Tensor

import decomposable as dn
from decomposable.network.calibration.grid import PASSES
from decomposable.network.tuning import LEARNING_RATE, STEPS

HELD_OUT = 5000
MEASURED = (0.75, 0.5, 0.35, 0.25, 0.2, 0.17, 0.15, 0.12, 0.1)


@dataclass(frozen=True)
class Augmented:
    """Training images in another order and cut at each pass."""

    images: Tensor
    batch: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.images), generator=self.generator)
        for part in order.split(self.batch)[: len(order) // self.batch]:
            yield augment(self.images[part], self.generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(images=4000)
    parser.add_argument("--network", type=Path, help="a file of `decomposable train cifar10-resnet20`")
    parser.add_argument("--test", action="store_true", help="measure on the test set")
    parser.add_argument("--measured", type=float, nargs="+", default=MEASURED, metavar="SIZE", help="sizes to measure")
    parser.add_argument("--sizes", type=float, nargs="+", metavar="SIZE", help="sizes to tune; by default tune_'s own")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--passes", type=float, default=PASSES, help="the most that a grid of calibrated sizes may cost"
    )
    args = parser.parse_args()

    train, labels = load_cifar10(args.data, "train")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    held_out, seen = order[-HELD_OUT:], order[: min(args.images, len(order) - HELD_OUT)]
    shown = load_cifar10(args.data, "test") if args.test else (train[held_out], labels[held_out])
    loader = Augmented(train[seen], args.batch, torch.Generator().manual_seed(1))
    net = dn.load(args.network) if args.network else None
    if net is None:
        net = dn.decompose(pretrained_resnet20(args.weights), example_input=next(iter(loader))[:1])
    if net.artifact().statistics is None:
        net.calibrate_(loader, passes=args.passes)

    def measured() -> list[float]:
        return [accuracy(net, *shown) for size in args.measured if net.resize_(macs=size)]

    before = measured()
    report = net.tune_(loader, args.sizes, steps=args.steps, learning_rate=args.learning_rate, passes=args.passes)
    after = measured()
    rows = [
        {"macs": size, "calibrated": b, "tuned": a} for size, b, a in zip(args.measured, before, after, strict=True)
    ]
    for row in rows:
        gain = row["tuned"] - row["calibrated"]
        print(f"{row['macs']:6.3f}x  calibrated {row['calibrated']:6.2f}%  tuned {row['tuned']:6.2f}%  {gain:+.2f}")
    tuning = report.seconds - (report.calibration.seconds if report.calibration else 0.0)
    print(f"tuned {len(report.sizes)} sizes in {tuning:.0f} s, then calibrated; {report.bytes:,} bytes")
    settings = {
        "images": len(seen),
        "batch": args.batch,
        "learning_rate": args.learning_rate,
        "passes": args.passes,
        "is_test": args.test,
    }
    record("tuning", {**settings, "rows": rows, "report": asdict(report)})


if __name__ == "__main__":
    main()
