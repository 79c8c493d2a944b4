"""A small size against the dense network, both in ONNX Runtime: CIFAR ResNet-34 at 0.25x MACs, ResNet-50 at 0.27x.

The files are those of `dn.export_onnx`, batch normalisation folded in both. The weights are drawn at random: the time
depends on shapes only, but the ranks of a trained network lie otherwise. Measured side by side are unrounded ranks,
those of `align="auto"`, which is what a device and `decomposable export` take, and multiples of 16, which this kind of
machine likes.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import interleave, onnx_session, ratio_of_medians, record, summary, verdict

import decomposable as dn
from decomposable_edge.console import rounding
from decomposable_edge.onnx_runtime import onnx_runtime


@dataclass(frozen=True)
class Case:
    model: str
    classes: int
    pixels: int
    macs: float
    wanted: dict[int, float]  # the least speed-up by batch
    repeats: dict[int, int]


CASES = (
    Case("resnet34", 100, 32, 0.25, {1: 3.0, 32: 2.5}, {1: 200, 32: 20}),
    Case("resnet50", 1000, 224, 0.27, {1: 2.5}, {1: 60}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--form", default="spatial", choices=("spatial", "channel"))
    parser.add_argument("--align", type=rounding, nargs="*", default=["auto", 16])
    parser.add_argument("--models", nargs="*", default=[case.model for case in CASES])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    figures: dict[str, Any] = {"threads": args.threads, "form": args.form, "onnxruntime": onnx_runtime().__version__}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.model in args.models:
                figures[case.model] = measure(case, args, Path(folder))
    record("deploy", figures)


def measure(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = dn.models.build(case.model, num_classes=case.classes).eval()
    net = dn.decompose(model, torch.zeros(2, 3, case.pixels, case.pixels), form=args.form)
    asked: dict[str, dict[str, Any]] = {"dense": {"macs": 1.0}, "unrounded": {"macs": case.macs, "align": 1}}
    asked.update({f"align {align}": {"macs": case.macs, "align": align} for align in args.align})
    sessions, found = {}, {}
    for name, size in asked.items():
        report = dn.export_onnx(net, folder / "net.onnx", **size)
        sessions[name] = onnx_session(folder / "net.onnx", args.threads)
        found[name] = {"macs": net.plan(**size).macs_fraction, "difference": report.largest_difference}
        (folder / "net.onnx").unlink()
    figures: dict[str, Any] = {"sizes": found}
    print(f"{case.model}, {case.pixels}x{case.pixels}, {case.macs}x MACs, {args.threads} threads:")
    for batch, wanted in case.wanted.items():
        x = np.random.default_rng(0).standard_normal((batch, 3, case.pixels, case.pixels), dtype=np.float32)
        runs = {name: (lambda one=one: one.run(None, {"input": x})) for name, one in sessions.items()}
        seconds = interleave(runs, case.repeats[batch], warmup=5)
        speedups = {name: ratio_of_medians(seconds["dense"], seconds[name]) for name in asked if name != "dense"}
        figures[f"batch {batch}"] = {
            "speedup": speedups,
            **{name: summary(values) for name, values in seconds.items()},
        }
        for name, speedup in speedups.items():
            verdict(f"  batch {batch}, {name}", speedup, f"at least {wanted}", speedup >= wanted)
    return figures


if __name__ == "__main__":
    main()
