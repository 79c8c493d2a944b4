"""A recurrent network at half its MACs: its time against `nn.LSTM` in PyTorch, and how long it takes to export."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import interleave, onnx_session, ratio_of_medians, record, summary, verdict
from _speech import FRAMES, MELS, SpeakerEncoder, speaker_encoder
from torch import nn

import decomposable as dn
from decomposable_edge.console import as_table

WANTED_RATIO, WANTED_SECONDS = 3.0, 30.0


def network(weights: Path | None) -> SpeakerEncoder:
    """With its own weights, or with random ones."""
    torch.manual_seed(0)
    return SpeakerEncoder().eval() if weights is None else speaker_encoder(weights)


def running(model: nn.Module, small: nn.Module, batch: int, repeats: int, *, gradient: bool) -> dict[str, Any]:
    """Times of both in PyTorch, side by side."""
    x = torch.randn(batch, FRAMES, MELS)

    def pass_of(module: nn.Module) -> None:
        with torch.set_grad_enabled(gradient):
            y = module(x).sum()
        if gradient:
            y.backward()  # type: ignore[no-untyped-call]

    seconds = interleave({"nn.LSTM": lambda: pass_of(model), "decomposed": lambda: pass_of(small)}, repeats, warmup=2)
    return {
        "batch": batch,
        "with_gradient": gradient,
        "ratio": ratio_of_medians(seconds["decomposed"], seconds["nn.LSTM"]),
        **{name: summary(each) for name, each in seconds.items()},
    }


def exported(net: Any, folder: Path, size: float) -> list[dict[str, Any]]:
    """CPU seconds of every export, and what it differs by."""
    dynamic = {"input": {1: "frames"}}
    exports = {
        "onnx": lambda: dn.export_onnx(net, folder / "small.onnx", macs=size),
        "onnx, any length": lambda: dn.export_onnx(net, folder / "any.onnx", macs=size, dynamic=dynamic),
        "onnx, full size": lambda: dn.export_onnx(net, folder / "full.onnx", macs=1.0),
        "any-size": lambda: net.save(folder / "any.safetensors", onnx=True),
        "torch-export": lambda: dn.export_torch(net, folder / "small.pt2", macs=size),
    }
    rows = []
    for name, export in exports.items():
        wall, cpu = time.perf_counter(), time.process_time()
        report = export()
        seconds = {"cpu_seconds": time.process_time() - cpu, "seconds": time.perf_counter() - wall}
        rows.append({"export": name, **seconds, "largest_difference": report.largest_difference})
        print(name, {key: round(value, 1) for key, value in seconds.items()}, flush=True)
    return rows


def in_onnx_runtime(folder: Path, repeats: int) -> dict[str, Any]:
    """Times of the full size, as operators, and of the small one, step by step, on one thread."""
    found: dict[str, Any] = {}
    sessions = {name: onnx_session(folder / f"{name}.onnx", 1) for name in ("full", "small")}
    for batch in (1, 16):
        x = torch.randn(batch, FRAMES, MELS).numpy()
        runs = {name: lambda s=session: s.run(None, {"input": x}) for name, session in sessions.items()}
        seconds = interleave(runs, repeats, warmup=2)
        found[f"batch {batch}"] = {
            "ratio": ratio_of_medians(seconds["small"], seconds["full"]),
            **{name: summary(each) for name, each in seconds.items()},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="pretrained.pt of Resemblyzer; by default random weights")
    parser.add_argument("--size", type=float, default=0.5, help="part of the MACs")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    model = network(options.weights)
    net = dn.decompose(model, torch.randn(1, FRAMES, MELS))
    small = net.extract(net.plan(macs=options.size))
    cases = [(batch, gradient) for batch in (1, 16) for gradient in (False, True)]
    times = [running(model, small, batch, options.repeats, gradient=gradient) for batch, gradient in cases]
    with tempfile.TemporaryDirectory() as folder:
        exports = exported(net, Path(folder), options.size)
        runtime = in_onnx_runtime(Path(folder), options.repeats)
    cells = [(str(row["batch"]), str(row["with_gradient"]), f"{row['ratio']:.2f}") for row in times]
    print(as_table(("batch", "with gradient", "time / nn.LSTM"), cells))
    largest = max(row["ratio"] for row in times)
    slowest = max(row["cpu_seconds"] for row in exports)
    verdict("time in PyTorch, of nn.LSTM's", largest, f"at most {WANTED_RATIO:g}", largest <= WANTED_RATIO)
    verdict("CPU seconds of an export", slowest, f"at most {WANTED_SECONDS:g}", slowest <= WANTED_SECONDS)
    figures = {"weights": "trained" if options.weights else "random", "size": options.size, "frames": FRAMES}
    record("recurrent", {**figures, "pytorch": times, "exports": exports, "onnxruntime": runtime})


if __name__ == "__main__":
    main()
