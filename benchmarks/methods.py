"""The time of one training step of each method relative to a plain step: CIFAR ResNet-34, batch 128, in one run.

What is random in a step is set to the middles of equal parts of its range, so that every run averages over the same
sizes: Z of Decomposable-Net over eight values, the two random widths of US-Nets over eight pairs. Decomposable-Net's
step is measured with an SVD and, between two SVDs, without one; `refresh=N` is the latter and an Nth of the difference.
Of `elastic`, from trained weights, a round is a full step and the low-rank ones after it, at a budget out of eight; a
step is the mean. One low-rank step in eight has an SVD.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from _common import interleave, record, verdict
from torch import nn

import decomposable_lab  # noqa: F401  its methods are measured, too
from decomposable import decompose, models
from decomposable.elastic.options import LOW_STEPS_PER_FULL
from decomposable.recipes.paper import CIFAR100
from decomposable.recipes.settings import Settings
from decomposable.training import methods

ROUNDS = 8
REFRESH = (1, 8, 32, 128)


def middles(low: float, high: float) -> list[float]:
    return [low + (high - low) * (i + 0.5) / ROUNDS for i in range(ROUNDS)]


class Stepper:
    """One method around a ResNet-34 of its own; calling it makes an optimiser step, or every turn, of round `i`."""

    def __init__(self, method: str, batch: tuple[torch.Tensor, torch.Tensor], settings: Settings) -> None:
        torch.manual_seed(0)
        self.settings, (self.x, self.y) = settings, batch
        model = models.resnet34(num_classes=100).to(memory_format=torch.channels_last)
        self.method = methods.find(method)
        if method == "tucker":
            make_low_rank_(model)
        network = self.method.network(model, self.x[:1], settings, is_trained=method in ("tucker", "elastic"))
        self.network = network.train()
        self.step = self.method.step(network, settings)
        self.turns = 1 + LOW_STEPS_PER_FULL if method == "elastic" else 1
        self.budgets = self.step.elastic.networks.sizes.range if method == "elastic" else None
        if method == "elastic":
            self.step.at(0, 10**6)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def __call__(self, i: int) -> None:
        if self.method.name == "decomposable":
            z = middles(*self.settings.ratio)[i]
            self.step.joint.sizes.range = (z, z)
        if self.method.name == "elastic":
            low, high = self.budgets
            budget = low * (high / low) ** middles(0, 1)[i]
            self.step.elastic.networks.sizes.range = (budget, budget)
        if hasattr(self.step, "draw"):
            low, widths = self.settings.width_range[0], middles(*self.settings.width_range)
            self.step.draw = lambda: {"smallest": low, "random1": widths[i], "random2": widths[-1 - i]}
        for _ in range(self.turns):
            self.optimizer.zero_grad()
            self.step.backward(lambda net: nn.functional.cross_entropy(net(self.x), self.y))
            self.optimizer.step()


@torch.no_grad()
def make_low_rank_(model: nn.Module, part: float = 0.4) -> None:
    """Fresh weights have no VBMF ranks to speak of: give them this part of their channels, and a little noise."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            o, i = module.weight.shape[:2]
            outputs, inputs = (torch.linalg.qr(torch.randn(n, max(1, round(part * n))))[0] for n in (o, i))
            low = module.weight.contiguous()
            for basis in (outputs, inputs):  # project one mode, then the other
                low = (basis @ (basis.mT @ low.flatten(1))).reshape(low.shape).transpose(0, 1).contiguous()
            module.weight.copy_(low + 1e-3 * low.std() * torch.randn_like(low))


def settings_of_all() -> dict[str, tuple[str, Settings]]:
    """What is timed, by its name: a method and its settings."""
    plan = decompose(
        models.resnet34(num_classes=100), example_input=torch.zeros(1, 3, 32, 32), criterion="uniform"
    ).selector.of_size(0.25)
    return {
        "plain": ("plain", CIFAR100),
        "width 0.75": ("width", replace(CIFAR100, width=0.75)),
        "width 0.5": ("width", replace(CIFAR100, width=0.5)),
        "scratch 0.25": ("scratch", replace(CIFAR100, ranks=tuple(plan.ranks.values()))),
        "tucker": ("tucker", CIFAR100),
        "trp": ("trp", CIFAR100),
        "slimmable": ("slimmable", CIFAR100),
        "us-net": ("us-net", CIFAR100),
        "with SVD": ("decomposable", CIFAR100),
        "without SVD": ("decomposable", replace(CIFAR100, refresh=10**6)),
        "elastic": ("elastic", CIFAR100),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="of each round, the fastest of which counts")
    parser.add_argument("--only", help="some of the names, separated by commas, beside plain")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(args.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    batch = x, torch.randint(0, 100, (args.batch,))
    chosen = settings_of_all()
    if args.only:
        chosen = {name: one for name, one in chosen.items() if name in ("plain", *args.only.split(","))}
    steppers = {n: Stepper(m, batch, s) for n, (m, s) in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for stepper in steppers.values():
        stepper(ROUNDS // 2)  # warm up; the one without SVD makes its first and last here
    for i in range(ROUNDS):
        functions = {n: (lambda s=s: s(i)) for n, s in steppers.items()}
        for name, seconds in interleave(functions, args.repeats, 0).items():
            # Whatever else the machine does can only make a step longer; of elastic, each has other bases.
            once = statistics.fmean(seconds) if name == "elastic" else min(seconds)
            times[name].append(once / steppers[name].turns)
        print(
            f"round {i + 1} of {ROUNDS}",
            {n: round(t[-1] / times["plain"][-1], 2) for n, t in times.items()},
            flush=True,
        )
    plain = statistics.fmean(times["plain"])
    relative = {name: statistics.fmean(seconds) / plain for name, seconds in times.items()}
    by_round = {name: [s / p for s, p in zip(t, times["plain"], strict=True)] for name, t in times.items()}
    print(f"a plain step: {1e3 * plain:.0f} ms")
    if {"with SVD", "without SVD"} <= relative.keys():
        svd = relative["with SVD"] - relative["without SVD"]
        for refresh in REFRESH:
            relative[f"decomposable refresh={refresh}"] = relative["without SVD"] + svd / refresh
    for name, value in relative.items():
        print(f"{name:<26} {value:.2f}")
    if "us-net" in relative:
        for refresh in REFRESH:
            ours = relative.get(f"decomposable refresh={refresh}", float("nan"))
            verdict(
                f"refresh={refresh} against US-Nets", ours / relative["us-net"], "at most 1", ours <= relative["us-net"]
            )
    if not args.no_record:
        figures = {
            "plain_ms": 1e3 * plain,
            "batch": args.batch,
            "repeats": args.repeats,
            "relative": relative,
            "by_round": by_round,
        }
        record("methods", figures)


if __name__ == "__main__":
    main()
