"""How to keep the moment of a wide side: whole, as its diagonal, in blocks, or as a sketch of low rank with a diagonal.

    python benchmarks/wide_outputs.py --text wikitext-2-valid.txt

A small language model (three words before, a hidden layer, an output for every word) is trained for a short while on
the first part of a text, and cut with contexts of it in each of these ways. What a cut keeps is KL(full ‖ cut) on
contexts of the last part, which nobody has seen. The vocabulary is narrow enough for the whole moment: that is the
reference. The sketch is the best one that there is, by the eigenvectors of the whole moment; one that is made
batch by batch cannot be better. Numbers of a side of N entries: N · block in blocks, N · (rank + 1) in a sketch.
Seconds are those of the processor.
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
from _common import record
from torch import Tensor, nn

import decomposable as dn
from decomposable.core import sums
from decomposable.core.shrinkage import shrunk
from decomposable.core.sums import Moments
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


def trained(x: Tensor, y: Tensor, words: int, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = LanguageModel(words)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(1024):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {float(loss.detach()):.2f}", flush=True)
    return model.eval()


def sketched(moments: Moments, rank: int) -> Moments:
    """The gradients' moment as its first eigenvectors, and the diagonal of what is left."""
    found = shrunk(moments)
    if found.gradients is None or len(found.gradients) <= rank:
        return found
    values, vectors = torch.linalg.eigh(found.gradients)
    low = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T
    return replace(found, gradients=low + torch.diag((found.gradients - low).diagonal().clamp_min(0.0)))


@contextmanager
def kept_as(way: str, words: int) -> Iterator[None]:
    """Inside, moments of wide sides are kept in this way."""
    kind, _, size = way.partition(" ")
    with mock.patch.object(sums, "WIDEST", words - 1 if kind in ("blocks", "diagonal") else words):
        if kind in ("blocks", "diagonal"):
            with mock.patch.object(sums, "BLOCK", int(size or 1)):
                yield
        elif kind == "sketch":
            with mock.patch.object(descent, "shrunk", lambda moments: sketched(moments, int(size))):
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
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--words", type=int, default=4096, help="outputs")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--contexts", type=int, default=2000, help="that it is cut with")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["weights", "whole", "blocks 256", "blocks 512", "blocks 1024", "diagonal", "sketch 255", "sketch 511"],
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    x, y = contexts(args.text, args.words)
    border = len(x) * 9 // 10
    model = trained(x[:border], y[:border], args.words, args.epochs)
    generator = torch.Generator().manual_seed(0)
    data = list(x[torch.randperm(border, generator=generator)[: args.contexts]].split(50))
    held = x[border:][torch.randperm(len(x) - border, generator=generator)[:HELD_OUT]]
    for way in args.ways:
        start = time.process_time()
        with kept_as(way, args.words):
            net = dn.decompose(model, data[0], **({} if way == "weights" else {"data": data, "criterion": "loss"}))
        seconds = round(time.process_time() - start, 1)
        found = lost(net, model, held)
        report = net.cut_report
        print(f"{way}, {seconds} s:", found, report.layers_by_weights if report else "", flush=True)
        settings = {"words": args.words, "epochs": args.epochs, "contexts": args.contexts}
        kept = report.as_dict() if report else None
        record("wide_outputs", {"way": way, **settings, "seconds": seconds, "kl": found, "report": kept})


if __name__ == "__main__":
    main()
