"""How close statistics stored by `calibrate_` come to calibrating a size on its own, and what they cost: ResNet-20 on
CIFAR-10.

    python benchmarks/calibration.py --data cifar-10-batches-bin --weights resnet20.th --network joint/net.safetensors

For every budget a network is evaluated twice: with the stored statistics, and calibrated at exactly that size with the
same images. Sizes that were calibrated themselves are avoided wherever there are others. The time is compared with
that of a dense grid of sizes, 1% apart down to 0.3 and 0.5% down to 0.1, which is what `calibrate_` made before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _cifar import accuracy, add_options, calibration_batches, load_cifar10, pretrained_resnet20
from _common import record, verdict
from torch import Tensor, nn

import decomposable as dn
from decomposable.network.decomposed import DecomposedNet

BUDGETS = (0.1, 0.125, 0.15, 0.17, 0.19, 0.215, 0.24, 0.265, 0.29, 0.32, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9, 0.985)


def dense_grid(smallest: float) -> list[float]:
    fractions, fraction = [], 1.0
    while fraction > smallest:
        fractions.append(fraction)
        fraction *= 0.99 if fraction > 0.3 else 0.995 if fraction > 0.1 else 0.9
    return [*fractions, smallest]


def off_grid(net: DecomposedNet, budget: float) -> float:
    """The budget, or one up to 1.5% larger whose size was not calibrated itself, where there is one."""
    calibrated = {plan.ranks for plan in net.artifact().statistics.plans}
    nearby = [min(1.0, budget * (1 + step / 2000)) for step in range(31)]
    return next((b for b in nearby if net.selector.of_size(b, "macs").ranks not in calibrated), budget)


def measure(model: nn.Module, batches: list[Tensor], images: Tensor, labels: Tensor, dense: bool) -> dict[str, Any]:
    net = dn.decompose(model, example_input=batches[0][:1])
    report = net.calibrate_(batches)
    settled = "" if report.is_settled else ", stopped before it was dense enough"
    print(
        f"calibrated {report.sizes} sizes in {report.seconds:.0f} s and {report.passes:.1f} passes{settled}; "
        f"{report.bytes:,} bytes"
    )
    rows = []
    for budget in [off_grid(net, budget) for budget in BUDGETS]:
        net.resize_(macs=budget)
        kept = accuracy(net, images, labels)
        alone = dn.decompose(model, example_input=batches[0][:1])
        alone.calibrate_(batches, sizes=[budget])
        alone.resize_(macs=budget)
        own = accuracy(alone, images, labels)
        rows.append({"macs": budget, "stored": kept, "recalibrated": own, "difference": kept - own})
        print(f"{budget:7.4f}x  stored {kept:6.2f}%  recalibrated {own:6.2f}%  {kept - own:+.2f}", flush=True)
    worst = min(row["difference"] for row in rows)
    verdict("largest loss against recalibrating, points", -worst, "at most 0.3", worst >= -0.3)
    found = {
        "rows": rows,
        "largest_loss": -worst,
        "sizes": report.sizes,
        "seconds": report.seconds,
        "passes": report.passes,
        "is_settled": report.is_settled,
        "bytes": report.bytes,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    if dense:
        sizes = dense_grid(net.selector.smallest_size + 1e-9)
        before = dn.decompose(model, example_input=batches[0][:1]).calibrate_(batches, sizes=sizes)
        again = dn.decompose(model, example_input=batches[0][:1]).calibrate_(batches)  # both sides of it in time
        ratio = (report.seconds + again.seconds) / 2 / before.seconds
        print(f"the dense grid: {before.sizes} sizes in {before.seconds:.0f} s and {before.passes:.0f} passes")
        verdict("time, in that of the dense grid", ratio, "at most 0.25", ratio <= 0.25)
        found |= {"dense_sizes": before.sizes, "dense_seconds": before.seconds, "time_ratio": ratio}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--network", type=Path, help="a file of `decomposable train cifar10-resnet20`, jointly trained")
    parser.add_argument("--held-out", type=int, metavar="N", help="N training images, not the test set; no record")
    args = parser.parse_args()
    if args.held_out:
        images, labels = load_cifar10(args.data, "train")
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[-args.held_out :]
        images, labels = images[chosen], labels[chosen]
    else:
        images, labels = load_cifar10(args.data, "test")
    batches = calibration_batches(args.data, args.images)
    print("trained elsewhere, plainly:")
    figures = {
        "images": args.images,
        "pretrained": measure(pretrained_resnet20(args.weights), batches, images, labels, dense=True),
    }
    if args.network is not None:
        print("fine-tuned jointly:")
        net = dn.load(args.network)
        figures["joint"] = measure(net.extract(net.selector.full_plan()), batches, images, labels, dense=False)
    if not args.held_out:
        record("calibration", figures)


if __name__ == "__main__":
    main()
