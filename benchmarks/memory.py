"""What keeping freed memory is worth: plain steps of a process that does and of one that does not, in turn.

    python benchmarks/memory.py

The CNN of the Fashion-MNIST recipe, batch 128, one thread. Seconds are the processor's: other work counts less.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from _common import record

import decomposable as dn
from decomposable_edge.machine import keep_freed_memory

WAYS = ("as it is", "kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what a process of its own is asked for
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(measured(args.way, args.steps)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--steps", str(args.steps)]
            found[way].append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    median = {way: {key: statistics.median(r[key] for r in rows) for key in rows[0]} for way, rows in found.items()}
    before, after = (median[way] for way in WAYS)
    ratios = {key: round(after[key] / before[key], 3) for key in before}
    print(median, "kept against as it is:", ratios, sep="\n")
    if not args.no_record:
        record("memory", {"medians": median, "ratios": ratios, "rounds": args.rounds, "steps": args.steps})


def measured(way: str, steps: int) -> dict[str, float]:
    """Seconds and page faults of a step, and the most memory of the process."""
    torch.set_num_threads(1)
    if way == "kept":
        keep_freed_memory()
    model = dn.models.small_cnn((16, 32, 32, 64, 64)).to(memory_format=torch.channels_last)
    x = torch.randn(128, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    for _ in range(3):
        step()
    start, faults = time.process_time(), _usage().ru_minflt
    for _ in range(steps):
        step()
    seconds, faults = time.process_time() - start, _usage().ru_minflt - faults
    return {"seconds": seconds / steps, "page_faults": faults / steps, "peak_mib": _usage().ru_maxrss / 1024}


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_SELF)


if __name__ == "__main__":
    main()
