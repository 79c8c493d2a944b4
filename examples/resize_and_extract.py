"""Decompose a model, calibrate it once, take any size, and keep one as a plain module.

    python examples/resize_and_extract.py [folder]

The weights here are random and so are the images; what is shown is the use.
"""

import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

import decomposable as dn


def main(folder: Path) -> None:
    """Everything that can be done with a trained model, in the order of use."""
    torch.manual_seed(0)
    model = dn.models.resnet20(num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32)

    # One SVD for every layer. The model itself is left as it is.
    net = dn.decompose(model, example_input=x, form="spatial")
    print(net)
    print("full size: largest difference to the original", f"{(net(x) - model(x)).abs().max():.1e}")

    # Batch normalisation needs statistics for every size. Yours would be training images, augmented as in training;
    # the grid is as dense as the network needs, after which any size can be had.
    images = [torch.randn(32, 3, 32, 32) for _ in range(2)]
    report = net.calibrate_(images, passes=5)
    print(f"calibrated {report.sizes} sizes in {report.seconds:.1f} s, {report.bytes / 1024:.0f} KiB")

    # Now sizes go up and down, in milliseconds, with no data.
    for size in (0.5, 0.125, 0.25):
        began = time.perf_counter()
        plan = net.resize_(macs=size)
        took = time.perf_counter() - began
        print(f"macs={size}: {plan.macs:,} MACs, {plan.params:,} parameters, resized in {took * 1000:.1f} ms")
    print(plan)

    # A plain module of the size in force, with no tie to `net`: fine-tune it, export it, save it.
    small = net.extract()
    path = folder / "small.pt"
    torch.save({"ranks": dict(plan.ranks), "weights": small.state_dict()}, path)
    print(f"saved {path.name}: {path.stat().st_size:,} bytes")
    print("loaded again, the output is the same:", torch.equal(load(path, x)(x), small(x)))


def load(path: Path, x: torch.Tensor) -> torch.nn.Module:
    """A network of the ranks that were saved, with the weights that were saved."""
    saved = torch.load(path, weights_only=True)
    net = dn.decompose(dn.models.resnet20(num_classes=10).eval(), example_input=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not calibrated: the statistics come with the weights
        net.resize_(ranks=saved["ranks"])
    small = net.extract()
    small.load_state_dict(saved["weights"])
    return small


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
