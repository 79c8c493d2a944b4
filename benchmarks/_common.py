"""What every benchmark shares: timing side by side, and one line per run in results/benchmarks.jsonl."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decomposable.training import records
from decomposable_edge.machine import timestamp
from decomposable_edge.onnx_runtime import onnx_runtime

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "benchmarks.jsonl"


COMMIT = records.commit()  # when the run begins: a long one may end after the next commit


def interleave(functions: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of every function, called in turn, so that a slow minute of the machine slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread (the middle half) in milliseconds."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return {
        "median_ms": 1e3 * statistics.median(ordered),
        "low_ms": 1e3 * ordered[quarter],
        "high_ms": 1e3 * ordered[-1 - quarter],
    }


def ratio_of_medians(numerator: list[float], denominator: list[float]) -> float:
    return statistics.median(numerator) / statistics.median(denominator)


def onnx_session(path: Path, threads: int) -> Any:
    """A file in ONNX Runtime, on the CPU."""
    options = onnx_options()
    options.intra_op_num_threads = threads
    return onnx_runtime().InferenceSession(path, options, providers=["CPUExecutionProvider"])


def onnx_options() -> Any:
    """For sessions that take turns: the threads of one wait by spinning, which would slow the one whose turn it is."""
    options = onnx_runtime().SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def record(name: str, figures: Mapping[str, Any]) -> None:
    """Print the figures and append them, with where they come from, to the records."""
    line = {
        "benchmark": name,
        "date": timestamp(),
        "command": " ".join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(records.without_folders, sys.argv[1:])]
        ),
        "commit": COMMIT,
        "machine": records.machine(),
        "figures": figures,
    }
    RECORDS.parent.mkdir(exist_ok=True)
    with RECORDS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"recorded in {RECORDS.relative_to(ROOT)}")


def verdict(what: str, measured: float, wanted: str, reached: bool) -> None:
    print(f"{what}: {measured:.2f} (wanted {wanted}): {'reached' if reached else 'NOT reached'}")
