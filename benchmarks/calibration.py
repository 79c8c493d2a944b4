"""How close statistics stored by `calibrate_` come to calibrating a size on its own: ResNet-20 on CIFAR-10.

    python benchmarks/calibration.py --data cifar-10-batches-bin --weights resnet20.th

For every budget the same network is evaluated on the test set twice: with the stored statistics, and calibrated at
exactly that size with the same images. Sizes that were calibrated themselves are avoided wherever there are others.
"""

from __future__ import annotations

import argparse

from _cifar import accuracy, add_options, calibration_batches, load_cifar10, pretrained_resnet20
from _common import record, verdict

import decomposable as dn
from decomposable.network import DecomposedNet

BUDGETS = (0.1, 0.125, 0.15, 0.17, 0.19, 0.215, 0.24, 0.265, 0.29, 0.32, 0.35, 0.4, 0.5, 0.6, 0.75, 0.9, 0.985)


def off_grid(net: DecomposedNet, budget: float) -> float:
    """The budget, or one up to 1.5% larger whose size was not calibrated itself, where there is one."""
    calibrated = {plan.ranks for plan in net._statistics.plans}
    nearby = [min(1.0, budget * (1 + step / 2000)) for step in range(31)]
    return next((b for b in nearby if net.selector.choose(macs=b).ranks not in calibrated), budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    args = parser.parse_args()
    test_images, test_labels = load_cifar10(args.data, "test")
    model = pretrained_resnet20(args.weights)
    batches = calibration_batches(args.data, args.images)

    net = dn.decompose(model, example_input=batches[0][:1])
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    report = net.calibrate_(batches)
    print(
        f"calibrated {report.sizes} sizes with {args.images} images in {report.seconds:.0f} s, {report.bytes:,} bytes"
    )
    stored, rows = net._statistics, []
    for budget in [off_grid(net, budget) for budget in BUDGETS]:
        net.resize_(macs=budget)
        kept = accuracy(net, test_images, test_labels)
        net.calibrate_(batches, sizes=[budget])
        own = accuracy(net, test_images, test_labels)
        net._statistics = stored
        rows.append({"macs": budget, "stored": kept, "recalibrated": own, "difference": kept - own})
        print(f"{budget:7.4f}x  stored {kept:6.2f}%  recalibrated {own:6.2f}%  {kept - own:+.2f}", flush=True)
    worst = min(row["difference"] for row in rows)
    verdict("largest loss against recalibrating, points", -worst, "at most 0.3", worst >= -0.3)
    record(
        "calibration",
        {
            "rows": rows,
            "largest_loss": -worst,
            "sizes": report.sizes,
            "images": args.images,
            "seconds": report.seconds,
            "bytes": report.bytes,
            "weight_bytes": weight_bytes,
        },
    )


if __name__ == "__main__":
    main()
