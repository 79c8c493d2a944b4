"""A 0.25x-MACs CIFAR ResNet-34 from `extract` against the dense network, in PyTorch, at batch 1 and 32."""

from __future__ import annotations

import argparse
import warnings

import torch
from _common import interleave, ratio_of_medians, record, summary, verdict

import decomposable as dn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--macs", type=float, default=0.25)
    parser.add_argument("--form", default="spatial", choices=("spatial", "channel"))
    parser.add_argument("--channels-last", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    dense = dn.models.resnet34(num_classes=100).eval()
    net = dn.decompose(dense, example_input=torch.zeros(1, 3, 32, 32), form=args.form)
    plan = net.resize_(macs=args.macs)
    small = net.extract()
    figures = {"macs": plan.macs_fraction, "form": args.form, "channels_last": args.channels_last}
    if args.channels_last:
        dense, small = (m.to(memory_format=torch.channels_last) for m in (dense, small))
    with torch.inference_mode():
        for batch, repeats in ((1, 100), (32, 20)):
            x = torch.randn(batch, 3, 32, 32)
            x = x.to(memory_format=torch.channels_last) if args.channels_last else x
            seconds = interleave({"dense": lambda: dense(x), "small": lambda: small(x)}, repeats, warmup=5)
            speedup = ratio_of_medians(seconds["dense"], seconds["small"])
            figures[f"speedup_batch_{batch}"] = speedup
            figures[f"batch_{batch}"] = {name: summary(values) for name, values in seconds.items()}
            verdict(f"speed-up at batch {batch}", speedup, "at least 2.3", speedup >= 2.3)
    record("inference", figures)


if __name__ == "__main__":
    main()
