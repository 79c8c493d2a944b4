"""What rounding ranks costs in accuracy: a pretrained ResNet-20 on CIFAR-10, not fine-tuned, with `align` 1, 8 and 16.

    python benchmarks/alignment.py --data cifar-10-batches-bin --weights resnet20.th

Every size is evaluated three times: with the statistics of unrounded sizes, with those that `calibrate_(align=...)`
stored, and with statistics of its own, which torch's `update_bn` computes from the same images.
"""

from __future__ import annotations

import argparse
import warnings

from _cifar import accuracy, add_options, calibration_batches, load_cifar10, pretrained_resnet20
from _common import record
from torch import Tensor
from torch.optim.swa_utils import update_bn

import decomposable as dn
from decomposable.network import DecomposedNet

BUDGETS = (0.7, 0.5, 0.35, 0.25)
ALIGNMENTS = (1, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    args = parser.parse_args()
    test_images, test_labels = load_cifar10(args.data, "test")
    batches = calibration_batches(args.data, args.images)
    net = dn.decompose(pretrained_resnet20(args.weights), example_input=batches[0][:1])
    report = net.calibrate_(batches)
    print(f"calibrated {report.sizes} sizes in {report.seconds:.0f} s", flush=True)
    found: dict[tuple[float, int], dict[str, float]] = {}
    cases = [(macs, align) for macs in BUDGETS for align in ALIGNMENTS if macs >= smallest(net, align)]
    for case in cases:
        found[case] = {"unrounded_statistics": evaluated(net, *case, test_images, test_labels)}
    for align in ALIGNMENTS[1:]:
        report = net.calibrate_(batches, align=align)
        print(f"calibrated {report.sizes} sizes with align={align} in {report.seconds:.0f} s", flush=True)
    for macs, align in cases:
        figures = found[macs, align]
        figures["stored"] = evaluated(net, macs, align, test_images, test_labels)
        figures["used"] = net.plan.macs_fraction or 0.0
        module = net.extract()
        update_bn(batches, module)
        figures["recalibrated"] = accuracy(module, test_images, test_labels)
        print(f"{macs}x, align {align:2}:", ", ".join(f"{k} {v:.3f}" for k, v in figures.items()), flush=True)
    rows = [{"macs": macs, "align": align, **figures} for (macs, align), figures in found.items()]
    record("alignment", {"images": args.images, "sizes": rows})


def smallest(net: DecomposedNet, align: int) -> float:
    return net.selector.smallest_cost("macs", align) / net.selector.full_cost("macs")


def evaluated(net: DecomposedNet, macs: float, align: int, images: Tensor, labels: Tensor) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rounded sizes were not calibrated
        net.resize_(macs=macs, align=align)
    return accuracy(net, images, labels)


if __name__ == "__main__":
    main()
