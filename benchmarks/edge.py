"""Changing the size of an any-size bundle of ResNet-50 on a device: seconds until the new session is in force.

Every change goes to a size that no session is kept for. Also measured: opening the bundle, going back to a kept size,
and a run of the session against one of the file that `dn.export_onnx` writes for the same size.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import interleave, onnx_options, onnx_session, ratio_of_medians, record, summary, verdict

import decomposable as dn
from decomposable_edge import AnySizeSession

SIZES = (0.27, 0.5, 0.25, 0.75, 0.3, 0.9, 0.2, 0.6, 0.4, 1.0, 0.8, 0.35, 0.15, 0.7, 0.45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=224)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net = dn.decompose(dn.models.resnet50(num_classes=1000).eval(), torch.zeros(2, 3, args.pixels, args.pixels))
    with tempfile.TemporaryDirectory() as folder:
        bundle, one = Path(folder) / "net.anysize.onnx", Path(folder) / "one.onnx"
        report = dn.export_any_size(net, bundle)
        print(f"bundle: {report.bytes:,} bytes; largest difference {report.largest_difference:.1e}")
        start = time.perf_counter()
        session = AnySizeSession(bundle, macs=0.26, align=16, threads=args.threads, session_options=onnx_options)
        figures: dict[str, Any] = {
            "bytes": report.bytes,
            "difference": report.largest_difference,
            "threads": args.threads,
        }
        figures["open_seconds"] = time.perf_counter() - start
        seconds = {macs: timed(session, macs) for macs in SIZES}
        back = [timed(session, SIZES[-1 - i % 2]) for i in range(20)]
        figures["resize_seconds"] = {str(macs): value for macs, value in seconds.items()}
        figures["resize_median"], figures["resize_slowest"] = statistics.median(seconds.values()), max(seconds.values())
        figures["back_to_a_kept_size_ms"] = 1e3 * statistics.median(back)
        dn.export_onnx(net, one, macs=0.27, align=16)
        session.resize(macs=0.27, align=16)
        plain = onnx_session(one, args.threads)
        x = np.random.default_rng(0).standard_normal((1, 3, args.pixels, args.pixels), dtype=np.float32)
        runs = interleave({"any size": lambda: session.run(x), "one": lambda: plain.run(None, {"input": x})}, 40, 5)
        figures["run_against_one_size"] = ratio_of_medians(runs["any size"], runs["one"])
        figures["run"] = {name: summary(values) for name, values in runs.items()}
    print(f"opening at 0.26x: {figures['open_seconds']:.2f} s")
    verdict(
        "seconds from one size to the next, median", figures["resize_median"], "under 1", figures["resize_median"] < 1
    )
    verdict("the slowest of them", figures["resize_slowest"], "under 1", figures["resize_slowest"] < 1)
    print(f"back to a kept size: {figures['back_to_a_kept_size_ms']:.2f} ms")
    print(f"a run against one of the exported file of that size: {figures['run_against_one_size']:.2f}x")
    record("edge", figures)


def timed(session: AnySizeSession, macs: float) -> float:
    start = time.perf_counter()
    session.resize(macs=macs, align=16)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
