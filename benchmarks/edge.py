"""Changing the size of a ResNet-50 on a device: seconds until the new session has taken the place of the old one.

Every change goes to a size that no session is kept for. Also measured: opening the file, going back to a kept size, and
a run of the session against one of the file that `dn.export_onnx` writes for the same size.

    python benchmarks/edge.py --against ../other-checkout

compares opening, changing the size and the largest memory with those of another checkout: processes of both take turns,
and seconds are those of the processor, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
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

import numpy as np
import torch
from _common import interleave, onnx_options, onnx_session, ratio_of_medians, record, summary, verdict

import decomposable as dn
from decomposable.export.any_size import save_with_graph
from decomposable_edge import AnySizeSession

HERE = Path(__file__).resolve().parents[1]
EXPORT = """
import sys, torch, warnings
import decomposable as dn
warnings.simplefilter("ignore")
torch.manual_seed(0)
pixels = int(sys.argv[2])
net = dn.decompose(dn.models.resnet50(num_classes=1000).eval(), torch.zeros(2, 3, pixels, pixels))
net.calibrate_([torch.randn(2, 3, pixels, pixels)], sizes=[0.6, 0.3])
net.save(sys.argv[1], onnx=True)
"""
DEVICE = """
import json, sys, time, warnings
import numpy as np
try:
    from decomposable_edge import AnySizeSession
except ImportError:
    from decomposable.edge import AnySizeSession
warnings.simplefilter("ignore")
file, pixels, start_at, *sizes = sys.argv[1:]

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def timed(work):
    start = time.process_time()
    work()
    return time.process_time() - start

sessions, before = [], peak()
found = {"open": timed(lambda: sessions.append(AnySizeSession(file, macs=float(start_at), align=16, threads=1)))}
found["open_bytes"] = peak() - before
seconds = [timed(lambda: sessions[0].resize(macs=float(size), align=16)) for size in sizes]
found |= {"resize_median": sorted(seconds)[len(seconds) // 2], "resize_slowest": max(seconds), "bytes": peak() - before}
sessions[0].run(np.zeros((1, 3, int(pixels), int(pixels)), np.float32))
print(json.dumps(found))
"""
SIZES = (0.27, 0.5, 0.25, 0.75, 0.3, 0.9, 0.2, 0.6, 0.4, 1.0, 0.8, 0.35, 0.15, 0.7, 0.45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--against", type=Path, help="another checkout: compare with it, and nothing else")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.against is not None:
        compare(args)
        return
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net = dn.decompose(dn.models.resnet50(num_classes=1000).eval(), torch.zeros(2, 3, args.pixels, args.pixels))
    with tempfile.TemporaryDirectory() as folder:
        file, one = Path(folder) / "net.safetensors", Path(folder) / "one.onnx"
        report = save_with_graph(net, file)
        print(f"file: {report.bytes:,} bytes; largest difference {report.largest_difference:.1e}")
        start = time.perf_counter()
        session = AnySizeSession(file, macs=0.26, align=16, threads=args.threads, session_options=onnx_options)
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


def compare(args: argparse.Namespace) -> None:
    """Take turns with another checkout, and record what each of them takes."""
    checkouts = {"before": args.against.resolve(), "after": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}{'.onnx' if name == 'before' else '.safetensors'}" for name in checkouts}
        for name, checkout in checkouts.items():
            run_in(checkout, EXPORT, files[name], args.pixels)
        for number in range(args.rounds):
            for name in list(checkouts)[:: 1 if number % 2 == 0 else -1]:
                sizes = (args.pixels, 0.26, *SIZES)
                found[name].append(json.loads(run_in(checkouts[name], DEVICE, files[name], *sizes).splitlines()[-1]))
                print(name, found[name][-1], flush=True)
    git = ["git", "-C", str(args.against), "rev-parse", "--short", "HEAD"]
    figures: dict[str, Any] = {"other_commit": subprocess.run(git, capture_output=True, text=True).stdout.strip()}
    for what in found["after"][0]:
        before, after = (statistics.median(run[what] for run in found[name]) for name in checkouts)
        figures[what] = {"before": before, "after": after, "ratio": after / before}
        verdict(f"{what}: after / before", after / before, "at most 1", after <= before)
    record("edge", {**figures, "rounds": args.rounds})


def run_in(checkout: Path, program: str, *arguments: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def timed(session: AnySizeSession, macs: float) -> float:
    start = time.perf_counter()
    session.resize(macs=macs, align=16)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
