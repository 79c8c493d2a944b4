"""How to keep the moment of a wide side: whole, as its diagonal, in blocks, or as a sketch of low rank with a diagonal.

    python benchmarks/wide_sides.py --text wikitext-2-valid.txt --words 3000
    python benchmarks/wide_sides.py --pixels cifar-10-batches-bin

With --text the outputs are wide: a small language model (three words before, a hidden layer, an output for every word)
is trained for a short while on the first part of a text. With --pixels the inputs are: an MLP that sees the 3,072
pixels of an image of CIFAR-10. Each is cut with some of what it was trained with in each of these ways. What a cut
keeps is KL(full ‖ cut) on others, which nobody has seen. The side is narrow enough for the whole moment: that is the
reference. The sketch is the best one that there is, by the eigenvectors of the whole moment; one that is made batch by
batch cannot be better. Numbers of a side of N entries: N · block in blocks, N · (rank + 1) in a sketch. Seconds are
those of the processor.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from _cifar import load_cifar10, standardise
from _common import record
from torch import Tensor, nn

import decomposable as dn
from decomposable.core import sums
from decomposable.core.sums import Moments, shrunk
from decomposable.network import descent

SIZES = (0.9, 0.75, 0.5, 0.35, 0.25)
BEFORE, HELD_OUT = 3, 2000


class LanguageModel(nn.Module):
    """The next word by the three before it."""

    def __init__(self, words: int, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.hidden, self.output = nn.Linear(BEFORE * width, hidden), nn.Linear(hidden, words)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.hidden(self.embedding(x).flatten(1)).relu())


def contexts(file: Path, words: int) -> tuple[Tensor, Tensor]:
    """Every three words of a text, and the one behind them; words that are not among the most frequent ones are 0."""
    text = re.findall(r"\S+", file.read_text())
    known = {word: i for i, (word, _) in enumerate(Counter(text).most_common(words - 1), 1)}
    numbers = torch.tensor([known.get(word, 0) for word in text])
    windows = numbers.unfold(0, BEFORE + 1, 1)
    return windows[:, :BEFORE].contiguous(), windows[:, BEFORE].contiguous()


def perceptron(pixels: int = 3072, hidden: int = 128) -> nn.Module:
    """Ten classes by all pixels."""
    return nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.ReLU(), nn.Linear(64, 10))


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(1024):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {float(loss.detach()):.2f}", flush=True)
    return model.eval()


def sketched(moments: Moments, width: int, rank: int) -> Moments:
    """The moments with those of wide sides as their first eigenvectors, and the diagonal of what is left."""
    found = shrunk(moments)
    sides = {"inputs": found.inputs, "gradients": found.gradients}
    wide = {name: each for name, each in sides.items() if each is not None and len(each) == width}
    return replace(found, **{name: _sketch(each, rank) for name, each in wide.items()})


def _sketch(moment: Tensor, rank: int) -> Tensor:
    values, vectors = torch.linalg.eigh(moment)
    low = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    return low + torch.diag((moment - low).diagonal().clamp_min(0.0))


@contextmanager
def kept_as(way: str, width: int) -> Iterator[None]:
    """Inside, moments of wide sides are kept in this way."""
    kind, _, size = way.partition(" ")
    with mock.patch.object(sums, "WIDEST", width - 1 if kind in ("blocks", "diagonal") else width):
        if kind in ("blocks", "diagonal"):
            with mock.patch.object(sums, "BLOCK", int(size or 1)):
                yield
        elif kind == "sketch":
            with mock.patch.object(descent, "shrunk", lambda moments: sketched(moments, width, int(size))):
                yield
        else:
            yield


@torch.no_grad()
def lost(net: dn.DecomposedNet, model: nn.Module, x: Tensor) -> dict[str, float]:
    full, found = model(x).log_softmax(dim=1), {}
    for size in SIZES:
        net.resize_(macs=size)
        low = net(x).log_softmax(dim=1)
        found[f"{size:g}"] = round(float((full.exp() * (full - low)).sum(dim=1).mean()), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--pixels", type=Path, help="CIFAR-10 in its binary layout")
    parser.add_argument("--words", type=int, default=4096, help="outputs, with --text")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000, help="that it is cut with")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["weights", "whole", "blocks 256", "blocks 512", "blocks 1024", "diagonal", "sketch 255", "sketch 511"],
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if args.text:
        (x, y), width, model = contexts(args.text, args.words), args.words, LanguageModel(args.words)
    else:
        images, y = load_cifar10(args.pixels, "train")
        x, width, model = standardise(images[:20_000]).flatten(1), 3072, perceptron()
    border = len(x) * 9 // 10
    model = trained(model, x[:border], y[:border], args.epochs)
    generator = torch.Generator().manual_seed(0)
    data = list(x[torch.randperm(border, generator=generator)[: args.samples]].split(50))
    held = x[border:][torch.randperm(len(x) - border, generator=generator)[:HELD_OUT]]
    network = f"{width} outputs" if args.text else f"{width} inputs"
    for way in args.ways:
        start = time.process_time()
        with kept_as(way, width):
            net = dn.decompose(model, data[0], **({} if way == "weights" else {"data": data, "criterion": "loss"}))
        seconds = round(time.process_time() - start, 1)
        found = lost(net, model, held)
        report = net.cut_report
        print(f"{way}, {seconds} s:", found, report.layers_by_weights if report else "", flush=True)
        figures = {"network": network, "way": way, "epochs": args.epochs, "samples": args.samples, "seconds": seconds}
        record("wide_sides", {**figures, "kl": found, "report": report.as_dict() if report else None})


if __name__ == "__main__":
    main()
