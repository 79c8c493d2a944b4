"""What rounding ranks costs in accuracy: a pretrained ResNet-20 on CIFAR-10, not fine-tuned, by `align`.

    python benchmarks/alignment.py --data cifar-10-batches-bin --weights resnet20.th

Every size is evaluated with the statistics of unrounded sizes; with a multiple such as 8 also with those that
`calibrate_(align=8)` stored; and with statistics of its own, which torch's `update_bn` computes from the same images.
`align="auto"` has to be within 0.3 points of unrounded ranks at every size, with their statistics.

`--held-out 5000` evaluates on training images that no calibration has seen, and records nothing: choices are made so.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from _cifar import accuracy, add_options, calibration_batches, load_cifar10, pretrained_resnet20
from _common import record, verdict
from torch import Tensor
from torch.optim.swa_utils import update_bn

import decomposable as dn
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.console import rounding
from decomposable_edge.sizing.rounding import AUTO_PERCENT, AUTO_WIDE, Align

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1)
WITHIN = 0.3  # points

Found = dict[tuple[float, Align], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--align", nargs="+", type=rounding, default=[1, "auto", 8, 16], help="1 is always there")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--held-out", type=int, help="evaluate on so many training images in place of the test images")
    args = parser.parse_args()
    aligns: list[Align] = list(dict.fromkeys([1, *args.align]))
    images, labels = evaluated_on(args)
    batches = calibration_batches(args.data, args.images)
    net = dn.decompose(pretrained_resnet20(args.weights), example_input=batches[0][:1]).eval()
    report = net.calibrate_(batches, align=1)
    print(f"calibrated {report.sizes} sizes in {report.seconds:.0f} s", flush=True)
    found = measured(net, args.budgets, aligns, batches, images, labels)
    losses = {macs: auto_loss(found, macs) for macs, align in found if align == "auto"}
    if losses:
        worst = max(losses.values())
        verdict("auto: largest loss against unrounded ranks, in points", worst, f"at most {WITHIN}", worst <= WITHIN)
    if args.held_out is None:
        rows = [{"macs": macs, "align": align, **figures} for (macs, align), figures in found.items()]
        auto = {"percent": AUTO_PERCENT, "wide": AUTO_WIDE}
        record("alignment", {"images": args.images, "auto": auto, "sizes": rows})


def evaluated_on(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """The test images; or training images, of which those to calibrate with are the first of the same permutation."""
    if args.held_out is None:
        return load_cifar10(args.data, "test")
    images, labels = load_cifar10(args.data, "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    chosen = order[args.images : args.images + args.held_out]
    return images[chosen], labels[chosen]


def measured(
    net: DecomposedNet,
    budgets: Sequence[float],
    aligns: Sequence[Align],
    batches: list[Tensor],
    images: Tensor,
    labels: Tensor,
) -> Found:
    found: Found = {}
    cases = [(macs, align) for macs in budgets for align in aligns if macs >= smallest(net, align)]
    for macs, align in cases:
        net_accuracy = evaluated(net, macs, align, images, labels)
        found[macs, align] = {"used": net.plan().macs_fraction or 0.0, "unrounded_statistics": net_accuracy}
        print(f"{macs}x, align {align}: {net_accuracy:.2f}", flush=True)
    for align in aligns:
        if align not in (1, "auto"):
            report = net.calibrate_(batches, align=align)
            print(f"calibrated {report.sizes} sizes with align={align} in {report.seconds:.0f} s", flush=True)
    for macs, align in cases:
        figures = found[macs, align]
        if align not in (1, "auto"):
            figures["stored"] = evaluated(net, macs, align, images, labels)
            module = net.extract()
            update_bn(batches, module)
            figures["recalibrated"] = accuracy(module, images, labels)
            print(f"{macs}x, align {align}:", ", ".join(f"{k} {v:.3f}" for k, v in figures.items()), flush=True)
    return found


def auto_loss(found: Found, macs: float) -> float:
    return found[macs, 1]["unrounded_statistics"] - found[macs, "auto"]["unrounded_statistics"]


def smallest(net: DecomposedNet, align: Align) -> float:
    return net.selector.smallest_cost("macs", align) / net.selector.full_cost("macs")


def evaluated(net: DecomposedNet, macs: float, align: Align, images: Tensor, labels: Tensor) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rounded sizes were not calibrated
        net.resize_(macs=macs, align=align)
    return accuracy(net, images, labels)


if __name__ == "__main__":
    main()
