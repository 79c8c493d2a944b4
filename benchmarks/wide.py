"""Tucker-2 against the spatial form on a wide network: `elastic` from a briefly trained start, on held-out images.

    python benchmarks/wide.py --data data --out runs/wide

A plain training makes the start, once for all forms. From it every form is trained by what `elastic` does from trained
weights (budgets, distillation, three low-rank steps after each full one and at the end one), on the same batches, and
its accuracy at some sizes is measured on training images that no step has seen; the test set plays no part. With
--form mixed the widest layers are tucker and all others spatial. Dropout is off: with that of VGG-15, a few hundred
steps do not even begin to learn.

What a step does follows from the seed and its number alone, and the state is kept in --out: a run that was stopped goes
on where it was, and one that has ended is not repeated. Rows go to results/benchmarks.jsonl as `wide`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from _cifar import accuracy, augment, default_folder, load_cifar10
from _common import record
from torch import Tensor, nn

import decomposable as dn
from decomposable.elastic import ElasticOptions
from decomposable.training.loop import parameter_groups

SIZES = (1.0, 0.5, 0.35, 0.25, 0.15, 0.1, 0.07, 0.05)
HELD_OUT, KEPT_EVERY = 5000, 20
MODELS = {"vgg15": dn.models.vgg15, "resnet34": dn.models.resnet34, "resnet20": dn.models.resnet20}
WIDEST = {"vgg15": ("conv[89]", "conv1[0-3]"), "resnet34": ("layer4.*",), "resnet20": ("layer3.*",)}
ELASTIC = ElasticOptions()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_folder(), help="CIFAR-10 in its binary layout")
    parser.add_argument("--out", type=Path, default=Path("runs/wide"), help="where a run's state is kept")
    parser.add_argument("--model", choices=MODELS, default="vgg15")
    parser.add_argument("--form", nargs="+", choices=("spatial", "tucker", "mixed"), default=["spatial", "tucker"])
    parser.add_argument("--start-steps", type=int, default=400, help="of the plain training before")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--low", type=float, default=ELASTIC.macs[0], help="the smallest budget drawn")
    parser.add_argument("--held-out", type=int, default=2000, help=f"images to judge by, at most {HELD_OUT}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    return parser.parse_args()


def form_of(name: str, model: str) -> str | dict[str, str]:
    return {**dict.fromkeys(WIDEST[model], "tucker"), "*": "spatial"} if name == "mixed" else name


class Run:
    """One training whose state is kept in a file."""

    def __init__(self, args: argparse.Namespace, name: str, model: nn.Module, steps: int) -> None:
        self.args, self.model, self.steps = args, model, steps
        self.file = args.out / f"{args.model}-{name}-{steps}-{args.seed}.pt"
        self.optimizer = torch.optim.SGD(parameter_groups(model, 5e-4), lr=args.rate, momentum=0.9, nesterov=True)
        self.elastic: dn.Elastic | None = None

    def train(self, images: Tensor, labels: Tensor) -> float:
        """Go on from the state that is kept, to the end; the seconds that it took in all come back."""
        done, seconds = self._load()
        for step in range(done, self.steps):
            begun = time.perf_counter()
            loss = self._step(step, images, labels)
            seconds += time.perf_counter() - begun
            if (step + 1) % KEPT_EVERY == 0 or step + 1 == self.steps:
                self._save(step + 1, seconds)
                print(f"{self.file.stem}: step {step + 1} of {self.steps}, {loss}, {seconds:.0f} s", flush=True)
        return seconds

    def _step(self, step: int, images: Tensor, labels: Tensor) -> str:
        seed = 1_000_003 * self.args.seed + 2 * step + (self.elastic is None)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, len(images), (self.args.batch,), generator=generator)
        x = augment(images[rows], generator).contiguous(memory_format=torch.channels_last)
        y = labels[rows]
        place = step / self.steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.rate * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * place))
        self.model.train()
        self.optimizer.zero_grad()
        if self.elastic is None:
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            said = f"loss {float(loss):.3f}"
        else:
            losses = self.elastic.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y))
            said = f"{losses.ran} {float(losses.loss):.3f}"
        self.optimizer.step()
        return said

    def _load(self) -> tuple[int, float]:
        if not self.file.is_file():
            return 0, 0.0
        state = torch.load(self.file, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.elastic is not None:
            self.elastic.load_state_dict(state["joint"])
        return state["step"], state["seconds"]

    def _save(self, step: int, seconds: float) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        state |= {"seconds": seconds, "joint": None if self.elastic is None else self.elastic.state_dict()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self.file)


def main() -> None:
    args = arguments()
    warnings.simplefilter("ignore")
    images, labels = load_cifar10(args.data, "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(12345))
    held, kept = order[: args.held_out], order[HELD_OUT:]
    example = torch.zeros(1, 3, 32, 32)

    def started() -> nn.Module:
        torch.manual_seed(args.seed)
        model = MODELS[args.model](num_classes=10).to(memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        Run(args, "start", model, args.start_steps).train(images[kept], labels[kept])
        return model

    for name in args.form:
        form = form_of(name, args.model)
        found_in = args.out / f"{args.model}-{name}-{args.steps}-{args.seed}.json"
        if found_in.is_file():
            print(f"{name}: ended before: {found_in.read_text()}")
            continue
        run = Run(args, name, started(), args.steps)
        options = replace(ELASTIC, macs=(args.low, ELASTIC.macs[1]))
        run.elastic = dn.Elastic(
            run.model, example_input=example, steps=args.steps, form=form, seed=args.seed, options=options
        )
        seconds = run.train(images[kept], labels[kept])
        net = run.elastic.decompose()
        generator = torch.Generator().manual_seed(1)
        batches = [augment(images[kept[part]], generator) for part in torch.arange(1000).split(250)]
        sizes = [size for size in SIZES if size >= net.selector.smallest_size]
        net.calibrate_(batches, sizes=sizes[1:])
        row = {}
        for size in sizes:
            net.resize_(macs=size)
            row[f"{size:g}"] = round(accuracy(net, images[held], labels[held]), 2)
        print(name, row, f"{seconds:.0f} s of training", flush=True)
        settings = {k: v for k, v in vars(args).items() if k not in ("data", "out", "no_record", "form")}
        figures = {"form": form, "settings": settings, "seconds": seconds, "accuracy": row}
        if not args.no_record:
            record("wide", figures)
        found_in.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
