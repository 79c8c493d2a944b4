"""What a cut without training keeps of an ImageNet ResNet-50 that somebody else trained: by data, by singular values.

    python benchmarks/cut_resnet50.py --weights resnet50.safetensors --images FOLDER --out DIR --cut 0 64 250 1000
    python benchmarks/cut_resnet50.py --weights resnet50.safetensors --images FOLDER --out DIR --judge

The first cuts with so many images of `calibration` (0: by singular values), and keeps a file for each in DIR; what is
there already is not made again. The second looks at `validation`: KL to the full network and accuracy, with statistics
from 250 images of `calibration`, and the differences to singular values, paired by image.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
from _common import record, verdict
from _imagenet import images_of, pretrained_resnet50

import decomposable as dn
from decomposable.network.goals import divergences

SIZES = (0.9, 0.75, 0.5, 0.35, 0.27)
BATCH = 25
STATISTICS = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="resnet50.safetensors")
    parser.add_argument("--images", type=Path, required=True, help="a folder with calibration and validation")
    parser.add_argument("--out", type=Path, required=True, help="where the networks are kept")
    parser.add_argument("--cut", type=int, nargs="*", default=[], metavar="N", help="images to cut with")
    parser.add_argument("--judge", action="store_true", help="measure on the validation images what is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = pretrained_resnet50(args.weights)
    calibration, _ = images_of(args.images / "calibration")
    calibration = calibration[torch.randperm(len(calibration), generator=torch.Generator().manual_seed(0))]
    for count in args.cut:
        if not (args.out / f"{count}.json").exists():
            cut(model, calibration[:count], calibration[:STATISTICS], args.out / f"{count}")
    if args.judge:
        judge(model, images_of(args.images / "validation"), args.out)


def cut(model: torch.nn.Module, images: torch.Tensor, statistics: torch.Tensor, out: Path) -> None:
    """Make the network, calibrate the sizes, and keep it with what the cut says of itself."""
    start = cpu = 0.0
    start, cpu = time.perf_counter(), time.process_time()
    shown = [start]

    def progress(line: str) -> None:
        if time.perf_counter() > shown[0] + 30:
            shown[0] = time.perf_counter()
            print(line, flush=True)

    by_data = (
        {"data": list(images.split(BATCH if len(images) > 100 else 16)), "progress": progress} if len(images) else {}
    )
    net = dn.decompose(model, statistics[:1], **by_data)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(net.cut_report, flush=True)
    net.calibrate_(list(statistics.split(50)), sizes=SIZES)
    net.save(out.with_suffix(".safetensors"))
    found = {
        "images": len(images),
        "seconds": round(seconds),
        "cpu_seconds": round(cpu),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load": os.getloadavg()[0],
        "report": net.cut_report.as_dict() if net.cut_report else None,
    }
    out.with_suffix(".json").write_text(json.dumps(found))


@torch.no_grad()
def judge(model: torch.nn.Module, images: tuple[torch.Tensor, torch.Tensor], out: Path) -> None:
    """KL and accuracy of every network at every size, on the validation images; what was measured is kept."""
    inputs, labels = images
    full = _logits(model, inputs, out / "full.npy")
    right = full.argmax(1) == labels
    by_weights: dict[float, tuple[np.ndarray, np.ndarray]] = {}
    for count in sorted(int(file.stem) for file in out.glob("*.safetensors")):
        made = json.loads((out / f"{count}.json").read_text())
        net = dn.load(out / f"{count}.safetensors", model=model)
        figures = {}
        for size in SIZES:
            net.resize_(macs=size)
            logits = _logits(net, inputs, out / f"{count}-{size:g}.npy")
            kl, hits = divergences((logits,), (full,)).numpy(), (logits.argmax(1) == labels).numpy()
            figures[f"{size:g}"] = row = {"kl": float(kl.mean()), "accuracy": 100 * float(hits.mean())}
            if count == 0:
                by_weights[size] = kl, hits
            elif size in by_weights:
                row |= _paired(kl, hits, *by_weights[size])
        record("cut_resnet50", {"full_accuracy": 100 * float(right.float().mean()), **made, "sizes": figures})
        if count and by_weights:
            _say(count, figures)


def _paired(kl: np.ndarray, hits: np.ndarray, other_kl: np.ndarray, other_hits: np.ndarray) -> dict[str, float]:
    """Differences to the cut by singular values on the same images, with their standard errors."""
    kls, points = kl - other_kl, 100.0 * (hits.astype(float) - other_hits.astype(float))
    root = len(kl) ** 0.5
    return {
        "kl_difference": float(kls.mean()),
        "kl_error": float(kls.std(ddof=1) / root),
        "accuracy_difference": float(points.mean()),
        "accuracy_error": float(points.std(ddof=1) / root),
    }


def _say(count: int, figures: dict[str, dict[str, float]]) -> None:
    for size, row in figures.items():
        what = f"{count} images, {size}x: KL less that of singular values"
        verdict(what, row["kl_difference"], "at most 0", row["kl_difference"] <= 0)
        what = f"{count} images, {size}x: accuracy less that of singular values"
        verdict(what, row["accuracy_difference"], "at least -1", row["accuracy_difference"] >= -1)


def _logits(net: torch.nn.Module, inputs: torch.Tensor, file: Path) -> torch.Tensor:
    if not file.exists():
        np.save(file, torch.cat([net(part) for part in inputs.split(BATCH)]).numpy())
    return torch.from_numpy(np.load(file))


if __name__ == "__main__":
    main()
