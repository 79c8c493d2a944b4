"""A joint step of CIFAR ResNet-34 (batch 128, spatial form) against a plain step, in one run.

Sizes are not drawn: Z, and the budget of `elastic`, are set to the middles of eight equal parts of their ranges, so
that every run averages over the same sizes, and that eight low-rank steps with refresh=8 have exactly one SVD in them.
Of `elastic`, whose networks take turns from trained weights on, each round has a full step and the low-rank
ones after it; a step is the mean. From scratch, half of its steps are plain and half have both networks: a step is the
mean of these. A plain step is also timed in the other memory layout, and steps are judged by the faster of the two.
Memory is the peak of a process of its own for each kind of step, above what it held before the first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from _common import interleave, record, verdict
from torch import nn

from decomposable import Elastic, JointObjective, models
from decomposable.elastic.options import LOW_STEPS_PER_FULL, ElasticOptions

RATIO, ELASTIC = (0.01, 0.5), ElasticOptions()
STEPS = 1 + LOW_STEPS_PER_FULL
PLACES = [(i + 0.5) / 8 for i in range(8)]
SCRATCH = "elastic from scratch"
WANTED = {"refresh=1": 2.4, "refresh=8": 1.8, "elastic": 1.3, SCRATCH: 1.3}
OTHER = "plain, other layout"
WANTED_MEMORY = {"refresh=1": 2.0, "refresh=8": 2.0, "elastic": 1.6, SCRATCH: 1.6}


def make(kind: str, batch: int, channels_last: bool) -> Callable[[float], None]:
    """A function that makes one optimiser step of this kind, or every turn; its argument is the place of the size."""
    torch.manual_seed(0)
    model = models.resnet34(num_classes=100)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 100, (batch,))
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def loss(net: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(net(x), y)

    if kind == "plain":

        def step(place: float) -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        return step
    is_elastic = kind.startswith("elastic")
    if is_elastic:  # in the phase that is timed, to the end; an order by data is found once in a training
        options = replace(ELASTIC, start=0.0, even=1.0, order="weights")
        joint = Elastic(
            model, example_input=x[:1], steps=10**6, from_scratch=kind == SCRATCH, form="spatial", options=options
        )
    else:
        joint = JointObjective(model, form="spatial", ratio=RATIO, refresh=int(kind.removeprefix("refresh=")))
    sizes = joint.networks.sizes if is_elastic else joint.sizes
    low, high = sizes.range

    def joint_step(place: float) -> None:
        size = low * (high / low) ** place if is_elastic else low + (high - low) * place
        sizes.range = (size, size)
        for _ in range(STEPS if kind == "elastic" else 1):
            optimizer.zero_grad()
            joint.backward(forward=lambda net: net(x), loss=lambda out: nn.functional.cross_entropy(out, y))
            optimizer.step()

    return joint_step


def resident_bytes(which: str) -> int:
    """Memory of this process: "VmRSS" is now, "VmHWM" its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def peak_memory(kind: str, batch: int, channels_last: bool) -> int:
    """Bytes above the start that a process reaches in steps of this kind, at the smallest and the largest size."""
    command = [sys.executable, __file__, "--peak", kind, "--batch", str(batch), *(["--channels-last"] * channels_last)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="rounds over the eight sizes")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--only", nargs="+", choices=WANTED, help="some kinds of steps, beside plain")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        step = make(args.peak, args.batch, args.channels_last)
        before = resident_bytes("VmRSS")
        for place in (PLACES[0], PLACES[-1]):
            step(place)
        print(json.dumps(resident_bytes("VmHWM") - before))
        return

    chosen = args.only or list(WANTED)
    kinds = ("plain", *chosen)
    steps = {kind: make(kind, args.batch, args.channels_last) for kind in kinds}
    steps[OTHER] = make("plain", args.batch, not args.channels_last)
    for step in steps.values():
        step(PLACES[4])
    times: dict[str, dict[float, list[float]]] = {kind: {place: [] for place in PLACES} for kind in steps}
    for _ in range(args.repeats):
        for place in PLACES:
            for kind, values in interleave({k: (lambda s=s: s(place)) for k, s in steps.items()}, 1, 0).items():
                times[kind][place] += [v / (STEPS if kind == "elastic" else 1) for v in values]
    totals = {kind: {place: sum(times[kind][place]) for place in PLACES} for kind in steps}
    if SCRATCH in totals:  # what was timed is a step of both networks
        late = 1 - ELASTIC.start
        totals[SCRATCH] = {p: late * totals[SCRATCH][p] + (1 - late) * totals["plain"][p] for p in PLACES}
    fastest = min("plain", OTHER, key=lambda kind: sum(totals[kind].values()))
    by_place = {k: {f"{p:.3f}": totals[k][p] / totals[fastest][p] for p in PLACES} for k in chosen}
    plain = sum(totals[fastest].values())
    milliseconds = {k: 1e3 * sum(totals[k].values()) / (len(PLACES) * args.repeats) for k in ("plain", OTHER)}
    print(f"a plain step: {milliseconds['plain']:.0f} ms, in the other layout {milliseconds[OTHER]:.0f} ms")
    figures = {
        "plain_ms": milliseconds["plain"],
        "other_layout_ms": milliseconds[OTHER],
        "by_place": by_place,
        "batch": args.batch,
        "channels_last": args.channels_last,
    }
    for kind in chosen:
        wanted = WANTED[kind]
        mean = sum(totals[kind].values()) / plain
        figures[kind] = mean
        print({place: round(ratio, 2) for place, ratio in by_place[kind].items()})
        verdict(f"joint step, {kind}, of a plain step", mean, f"at most {wanted}", mean <= wanted)
    peaks = {kind: peak_memory(kind, args.batch, args.channels_last) for kind in kinds}
    for kind in chosen:
        wanted = WANTED_MEMORY[kind]
        share = peaks[kind] / peaks["plain"]
        figures[f"{kind} memory"] = share
        verdict(f"peak memory, {kind}, of a plain step's", share, f"at most {wanted}", share <= wanted)
    record("joint_step", {**figures, "peak_bytes": peaks})


if __name__ == "__main__":
    main()
