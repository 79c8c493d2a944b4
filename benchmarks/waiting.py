"""What one waits for, here and in another checkout: `cut` and `calibrate_` of a ResNet-20, `export --any-size` of a
small U-Net and of a small detector.

    python benchmarks/waiting.py --against ../other-checkout --weights resnet20.th --images cifar10.npz

Both are measured in processes of their own that take turns, each as a command would run, so that a slow minute of the
machine slows both alike. Seconds are those of the processor: on a machine that others use, those of the clock say how
busy they are. The images are an array `x_calib` (uint8, NCHW); a cut is judged by those of `x_test`, which it did not
see: its mean distance to the full network (KL divergence) says whether what is faster is worse.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parents[1]
PIXELS = 128
WHAT = ["unet", "detector", "calibration", "cut"]
JUDGED = [0.75, 0.5, 0.35, 0.25]


def convolutions(channels_in: int, channels: int, stride: int = 1) -> nn.Sequential:
    """Two of them, with normalisation."""
    layers: list[nn.Module] = []
    for before, step in ((channels_in, stride), (channels, 1)):
        conv = nn.Conv2d(before, channels, 3, stride=step, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Four levels down and up, with what was on the way down beside what comes up."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(convolutions(i, o) for i, o in zip([3, *widths], widths, strict=False))
        self.reduce = nn.ModuleList(nn.Conv2d(2 * each, each, 1) for each in widths[-2::-1])
        self.up = nn.ModuleList(convolutions(2 * each, each) for each in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        beside = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            beside.append(x)
        for reduce, block, other in zip(self.reduce, self.up, beside[-2::-1], strict=True):
            x = block(torch.cat([other, F.interpolate(reduce(x), scale_factor=2.0, mode="nearest")], dim=1))
        return self.head(x)


class Detector(nn.Module):
    """A backbone, a pyramid of features, and heads for classes and boxes at each of its levels."""

    def __init__(self, width: int = 16, features: int = 32, classes: int = 5, anchors: int = 9) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.stages = nn.ModuleList(convolutions(i, o, stride=2) for i, o in zip([3, *widths], widths, strict=False))
        self.lateral = nn.ModuleList(nn.Conv2d(each, features, 1) for each in widths[1:])
        self.tower = nn.Sequential(nn.Conv2d(features, features, 3, padding=1), nn.ReLU())
        self.classes = nn.Conv2d(features, anchors * classes, 3, padding=1)
        self.boxes = nn.Conv2d(features, anchors * 4, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        found, above = {}, None
        for i, (lateral, level) in enumerate(zip(reversed(self.lateral), reversed(levels[1:]), strict=True)):
            own = lateral(level)
            above = own if above is None else own + F.interpolate(above, scale_factor=2.0, mode="nearest")
            seen = self.tower(above)
            found |= {f"classes{i}": self.classes(seen).flatten(2), f"boxes{i}": self.boxes(seen).flatten(2)}
        return found


def measure_export(kind: str) -> dict[str, Any]:
    """Seconds of one export, the imports that it needs included, as in a command."""
    import decomposable as dn

    torch.manual_seed(0)
    model = {"unet": UNet, "detector": Detector}[kind]().eval()
    net = dn.decompose(model, example_input=torch.randn(1, 3, PIXELS, PIXELS))
    net.calibrate_([torch.randn(4, 3, PIXELS, PIXELS)], sizes=[0.5, 0.25])
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        is_earlier = importlib.util.find_spec("decomposable.edge") is not None
        report = _export()(net, Path(folder) / ("net.onnx" if is_earlier else "net.safetensors"))
        seconds = time.process_time() - start
    return {"seconds": seconds, "bytes": report.bytes, "sizes_compared": len(report.sizes)}


def _export() -> Any:
    """Return what writes a file of all sizes, by the name that it has in this checkout."""
    from decomposable.export import any_size

    return getattr(any_size, "save_with_graph", None) or any_size.export_any_size


def measure_calibration(weights: Path, file: Path, passes: float) -> dict[str, Any]:
    """Seconds of a calibration, and a digest of its statistics."""
    import hashlib

    import numpy as np
    from _cifar import augment, pretrained_resnet20

    import decomposable as dn

    images = torch.from_numpy(np.load(file)["x_calib"])
    generator = torch.Generator().manual_seed(0)
    batches = [augment(part, generator) for part in images.split(125)]
    net = dn.decompose(pretrained_resnet20(weights), example_input=batches[0][:1])
    start = time.process_time()
    report = net.calibrate_(batches, passes=passes)
    seconds = time.process_time() - start
    statistics_ = net.artifact().statistics
    digest = hashlib.sha256(statistics_.mean_SC.numpy().tobytes() + statistics_.var_SC.numpy().tobytes()).hexdigest()
    return {"seconds": seconds, "sizes": report.sizes, "is_settled": report.is_settled, "digest": digest[:16]}


def measure_cut(weights: Path, file: Path, passes: float) -> dict[str, Any]:
    """Seconds of what `decomposable cut` does before it measures accuracies: bases by data, statistics, the file."""
    import numpy as np
    from _cifar import augment, pretrained_resnet20, standardise

    import decomposable as dn

    arrays = np.load(file)
    generator = torch.Generator().manual_seed(0)
    batches = [augment(part, generator) for part in torch.from_numpy(arrays["x_calib"]).split(125)]
    model = pretrained_resnet20(weights)
    start = time.process_time()
    net = dn.decompose(model, example_input=batches[0][:1], data=batches)
    bases = time.process_time()
    report = net.calibrate_(batches, passes=passes)
    with tempfile.TemporaryDirectory() as folder:
        net.save(Path(folder) / "net.safetensors")
    seconds = time.process_time() - start
    distances = distances_to(model, net, standardise(torch.from_numpy(arrays["x_test"])))
    return {"seconds": seconds, "of_bases": bases - start, "sizes": report.sizes, "kl": distances}


@torch.no_grad()
def distances_to(model: nn.Module, net: Any, images: Tensor) -> dict[str, float]:
    """KL(full ‖ size), the mean over the images, at some sizes."""

    def log_p(network: nn.Module) -> Tensor:
        return torch.cat([network(part) for part in images.split(125)]).double().log_softmax(dim=1)

    full, found = log_p(model.eval()), {}
    for size in JUDGED:
        net.resize_(macs=size)
        found[f"{size:g}"] = float((full.exp() * (full - log_p(net))).sum(dim=1).mean())
    return found


def measured_in(checkout: Path, what: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a checkout, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    options = ["--weights", str(args.weights), "--images", str(args.images), "--passes", str(args.passes)]
    done = subprocess.run(
        [sys.executable, __file__, "--measure", what, *options],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def as_a_command() -> None:
    """What `decomposable` does when it starts, where it does."""
    from decomposable_edge import machine

    if hasattr(machine, "keep_freed_memory"):
        machine.keep_freed_memory()


def compared(what: str, args: argparse.Namespace) -> dict[str, Any]:
    from _common import verdict

    found: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for number in range(args.rounds):
        for which in ("before", "after") if number % 2 == 0 else ("after", "before"):
            found[which].append(measured_in(args.against.resolve() if which == "before" else HERE, what, args))
            print(what, which, found[which][-1], flush=True)
    before, after = ([run["seconds"] for run in found[which]] for which in ("before", "after"))
    ratio = statistics.median(after) / statistics.median(before)
    verdict(f"{what}: after / before", ratio, "under 1", ratio < 1)
    return {"before": found["before"], "after": found["after"], "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout; none: nothing to compare with")
    parser.add_argument("--weights", type=Path, help="state dict of a CIFAR-10 ResNet-20; none: exports only")
    parser.add_argument("--images", type=Path, help="an .npz file with x_calib")
    parser.add_argument("--passes", type=float, default=60.0, help="of the full network: the most that a grid may cost")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.measure:
        torch.set_num_threads(1)
        as_a_command()
        by_images = {"calibration": measure_calibration, "cut": measure_cut}.get(args.measure)
        found = by_images(args.weights, args.images, args.passes) if by_images else measure_export(args.measure)
        print(json.dumps(found))
        return
    if args.against is None:
        print("no other checkout was named: nothing to compare with")
        return
    from _common import record  # not above: it takes modules of this checkout

    git = ["git", "-C", str(args.against), "rev-parse", "--short", "HEAD"]
    figures: dict[str, Any] = {"other_commit": subprocess.run(git, capture_output=True, text=True).stdout.strip()}
    for what in args.what:
        if what in ("unet", "detector") or (args.weights and args.images):
            figures[what] = compared(what, args)
    record("waiting", figures)


if __name__ == "__main__":
    main()
