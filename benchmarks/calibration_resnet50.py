"""How long `calibrate_` takes on a ResNet-50 with 256 images of 224 x 224, on random weights and noise.

python benchmarks/calibration_resnet50.py
"""

from __future__ import annotations

import argparse

import torch
from _common import record, verdict

import decomposable as dn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--passes", type=float, default=60.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = dn.models.resnet50(num_classes=1000).eval()
    batches = list(torch.randn(args.images, 3, 224, 224).split(args.batch))
    net = dn.decompose(model, example_input=batches[0][:1])
    report = net.calibrate_(batches, passes=args.passes, progress=lambda line: None)
    minutes = report.seconds / 60
    print(f"{report.sizes} sizes, {report.passes:.1f} passes, {report.bytes:,} bytes, settled: {report.is_settled}")
    verdict("minutes", minutes, "at most 20", minutes <= 20)
    record("calibration_resnet50", {**vars(args), **vars(report), "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
