"""What a cut without training keeps: a ResNet of CIFAR-10 by several criteria.

    python benchmarks/cut.py --data cifar-10-batches-bin --weights resnet20.th --criteria loss singular_value

Bases are found and statistics computed with the same training images, augmented. Accuracy is that of 5,000 other
training images, or with --test of the test set. `cut_resnet50.py` does the same with a network of ImageNet.

    python benchmarks/cut.py --data cifar-10-batches-bin --weights resnet20.th --judging --measured-with 250 500 2000

tells what it costs that samples which were kept out judge the cut: seconds of the processor of `decompose(data=)` as it
is, and of one whose samples all measure and which compares nothing. The two take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _cifar import accuracy, add_options, augment, load_cifar10, pretrained_resnet20
from _common import record

import decomposable as dn
from decomposable import models
from decomposable.network.descent import Descent
from decomposable.network.judging import JudgedSize
from decomposable.network.samples import Samples, dealt
from decomposable.training.weights import load_weights_

HELD_OUT = 5000
SIZES = (0.75, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1)
BY_DATA = ("loss", "output")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(images=2000)
    parser.add_argument("--criteria", nargs="+", default=["loss"], metavar="NAME")
    parser.add_argument("--form", default="spatial")
    parser.add_argument("--resnet56", type=Path, help="the weights of a ResNet-56 in place of --weights")
    parser.add_argument("--measured-with", type=int, nargs="+", metavar="N", help="images that bases are found with")
    parser.add_argument("--test", action="store_true", help="measure on the test set")
    parser.add_argument("--tune", action="store_true", help="then tune scales, shifts and biases, and measure again")
    parser.add_argument("--seed", type=int, default=0, help="of which images, and how augmented")
    parser.add_argument("--judging", action="store_true", help="measure what judging costs, and nothing else")
    parser.add_argument("--repeats", type=int, default=2, help="of --judging")
    args = parser.parse_args()
    images, labels = load_cifar10(args.data, "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(12345))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    judged = load_cifar10(args.data, "test") if args.test else (images[held], labels[held])
    if args.resnet56 is None:
        model = pretrained_resnet20(args.weights)
    else:
        model = models.resnet56(num_classes=10).eval()
        load_weights_(model, args.resnet56)
    generator = torch.Generator().manual_seed(args.seed)
    chosen = kept[torch.randperm(len(kept), generator=generator)[: args.images]]
    batches = [augment(images[part], generator) for part in chosen.split(250)]
    if args.judging:
        for count in args.measured_with or [args.images]:
            time_judging(model, _first(batches, count), count, args.repeats)
        return
    for criterion in args.criteria:
        for count in args.measured_with or [args.images]:
            start = time.perf_counter()
            by_data = {"criterion": criterion, "data": _first(batches, count)} if criterion in BY_DATA else {}
            net = dn.decompose(model, batches[0][:1], form=args.form, **(by_data or {"criterion": criterion}))
            seconds = time.perf_counter() - start
            net.calibrate_(batches, sizes=SIZES)
            found = reached(net, judged)
            print(f"{criterion}, {count} images, {seconds:.0f} s:", found, flush=True)
            tuned = {}
            if args.tune:
                start = time.perf_counter()
                net.tune_(batches, sizes=SIZES, progress=lambda line: None)
                tuned = {"tuning_seconds": round(time.perf_counter() - start, 1), "tuned": reached(net, judged)}
                print("tuned:", tuned, flush=True)
            record(
                "cut",
                {
                    "network": "ResNet-20" if args.resnet56 is None else "ResNet-56",
                    "criterion": criterion,
                    "form": args.form,
                    "images": count if by_data else 0,
                    "calibrated_with": args.images,
                    "seed": args.seed,
                    "judged_by": "test" if args.test else "held-out training images",
                    "seconds": round(seconds, 1),
                    "accuracy": found,
                    **tuned,
                },
            )


def reached(net: dn.DecomposedNet, judged: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """The accuracy at every size."""
    found = {}
    for size in (1.0, *SIZES):
        net.resize_(macs=size)
        found[f"{size:g}"] = round(accuracy(net, *judged), 2)
    return found


def time_judging(model: torch.nn.Module, data: list[torch.Tensor], images: int, repeats: int) -> None:
    """Seconds with samples that judge, and without."""
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(repeats):
        start = time.process_time()
        report = dn.decompose(model, data=data).cut_report
        seconds["with"].append(round(time.process_time() - start, 1))
        with nothing_judges():
            start = time.process_time()
            dn.decompose(model, data=data)
            seconds["without"].append(round(time.process_time() - start, 1))
    assert report is not None
    ratio = sum(seconds["with"]) / sum(seconds["without"])
    print(f"{images} images: {ratio:.2f} times the seconds", seconds, flush=True)
    figures = {"network": "ResNet-20", "images": images, "seconds": seconds, "ratio": round(ratio, 3)}
    record("cut_judging", {**figures, "report": report.as_dict()})


@contextmanager
def nothing_judges() -> Iterator[None]:
    """Inside, all samples measure, some of them share a cut out, and nothing is compared."""

    def all_measure(*args: Any) -> Samples:
        samples = dealt(*args)
        batches = [*samples.measure, *samples.judge]
        return Samples(batches, samples.judge, samples.count, samples.judging, len(batches))

    def measure(self: Descent, *args: Any, is_judged: bool) -> None:
        original(self, *args, is_judged=False)

    def compared(self: Descent, all_found: Any, judges: Any, size: float) -> JudgedSize:
        return JudgedSize(size=size, by_data=0.0, by_weights=1.0)

    original = Descent._measure
    with (
        mock.patch.object(import_module("decomposable.network.importance"), "dealt", all_measure),
        mock.patch.object(Descent, "_measure", measure),
        mock.patch.object(Descent, "compared", compared),
    ):
        yield


def _first(batches: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    return list(torch.cat(batches)[:count].split(min(250, count)))


if __name__ == "__main__":
    main()
