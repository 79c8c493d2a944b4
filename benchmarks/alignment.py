"""What rounding ranks costs in accuracy: a pretrained ResNet-20 on CIFAR-10, not fine-tuned, with `align` 1, 8 and 16.

    python benchmarks/alignment.py --data cifar-10-batches-bin --weights resnet20.th

Rounded ranks are no size of the calibrated grid, so every size is also evaluated with statistics of its own, which
torch's `update_bn` computes from the same images.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _cifar import accuracy, augment, default_folder, load_cifar10, pretrained_resnet20
from _common import record
from torch.optim.swa_utils import update_bn

import decomposable as dn

BUDGETS = (0.7, 0.5, 0.35, 0.25)
ALIGNMENTS = (1, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=default_folder(), help="CIFAR-10 in its binary layout")
    parser.add_argument(
        "--weights", type=Path, default=default_folder() / "resnet20.th", help="state dict of ResNet-20"
    )
    parser.add_argument("--images", type=int, default=1000, help="training images to calibrate with")
    args = parser.parse_args()
    test_images, test_labels = load_cifar10(args.data, "test")
    train_images, _ = load_cifar10(args.data, "train")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(train_images), generator=generator)[: args.images]
    batches = [augment(train_images[part], generator) for part in chosen.split(250)]
    net = dn.decompose(pretrained_resnet20(args.weights), example_input=batches[0][:1])
    report = net.calibrate_(batches)
    print(f"calibrated {report.sizes} sizes in {report.seconds:.0f} s", flush=True)
    rows = []
    for macs in BUDGETS:
        for align in ALIGNMENTS:
            plan = net.resize_(macs=macs, align=align)
            stored = accuracy(net, test_images, test_labels)
            module = net.extract()
            update_bn(batches, module)
            own = accuracy(module, test_images, test_labels)
            rows.append(
                {"macs": macs, "align": align, "used": plan.macs_fraction, "stored": stored, "recalibrated": own}
            )
            print(
                f"{macs}x, align {align:2}: uses {plan.macs_fraction:.3f}x, {stored:.2f}%, recalibrated {own:.2f}%",
                flush=True,
            )
    record("alignment", {"images": args.images, "sizes": rows})


if __name__ == "__main__":
    main()
