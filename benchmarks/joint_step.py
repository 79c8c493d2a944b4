"""A joint step of CIFAR ResNet-34 (batch 128, spatial form, ratio (0.01, 0.5)) against a plain step, in one run.

Z is not drawn but set to the middles of eight equal parts of its range, so that every run averages over the same sizes,
and that a round of eight steps with refresh=8 has exactly one SVD in it.
Memory is the peak of a process of its own for each kind of step, above what it held before the first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _common import interleave, record, verdict
from torch import nn

from decomposable import JointObjective, models

RATIO = (0.01, 0.5)
MIDDLES = [RATIO[0] + (RATIO[1] - RATIO[0]) * (i + 0.5) / 8 for i in range(8)]


def make(kind: str, batch: int, channels_last: bool) -> Callable[[float], None]:
    """A function that makes one optimiser step of this kind; its argument is Z."""
    torch.manual_seed(0)
    model = models.resnet34(num_classes=100)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 100, (batch,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def loss(net: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(net(x), y)

    if kind == "plain":

        def step(ratio: float) -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        return step
    joint = JointObjective(model, form="spatial", ratio=RATIO, refresh=int(kind.removeprefix("refresh=")))

    def joint_step(ratio: float) -> None:
        joint.ratio = (ratio, ratio)
        optimizer.zero_grad()
        joint.backward(loss)
        optimizer.step()

    return joint_step


def resident_bytes(which: str) -> int:
    """Memory of this process: "VmRSS" is now, "VmHWM" its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def peak_memory(kind: str, batch: int, channels_last: bool) -> int:
    """Bytes above the start that a process reaches in steps of this kind, at the smallest and the largest Z."""
    command = [sys.executable, __file__, "--peak", kind, "--batch", str(batch), *(["--channels-last"] * channels_last)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="rounds over the eight values of Z")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        step = make(args.peak, args.batch, args.channels_last)
        before = resident_bytes("VmRSS")
        for ratio in (MIDDLES[0], MIDDLES[-1]):
            step(ratio)
        print(json.dumps(resident_bytes("VmHWM") - before))
        return

    kinds = ("plain", "refresh=1", "refresh=8")
    steps = {kind: make(kind, args.batch, args.channels_last) for kind in kinds}
    for step in steps.values():
        step(MIDDLES[4])
    times: dict[str, dict[float, list[float]]] = {kind: {z: [] for z in MIDDLES} for kind in kinds}
    for _ in range(args.repeats):
        for z in MIDDLES:
            for kind, values in interleave({k: (lambda s=s: s(z)) for k, s in steps.items()}, 1, 0).items():
                times[kind][z] += values
    totals = {kind: {z: sum(times[kind][z]) for z in MIDDLES} for kind in kinds}
    by_ratio = {k: {f"{z:.3f}": totals[k][z] / totals["plain"][z] for z in MIDDLES} for k in kinds[1:]}
    plain = sum(totals["plain"].values())
    figures = {
        "plain_ms": 1e3 * plain / (len(MIDDLES) * args.repeats),
        "by_ratio": by_ratio,
        "batch": args.batch,
        "channels_last": args.channels_last,
    }
    for kind, wanted in (("refresh=1", 2.4), ("refresh=8", 1.8)):
        mean = sum(totals[kind].values()) / plain
        figures[kind] = mean
        print({z: round(r, 2) for z, r in by_ratio[kind].items()})
        verdict(f"joint step, {kind}, of a plain step", mean, f"at most {wanted}", mean <= wanted)
    peaks = {kind: peak_memory(kind, args.batch, args.channels_last) for kind in kinds}
    for kind in kinds[1:]:
        share = peaks[kind] / peaks["plain"]
        figures[f"{kind} memory"] = share
        verdict(f"peak memory, {kind}, of a plain step's", share, "at most 2", share <= 2)
    record("joint_step", {**figures, "peak_bytes": peaks})


if __name__ == "__main__":
    main()
