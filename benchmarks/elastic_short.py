"""How a short training from scratch is best divided: plain steps first, or both networks in turns from the start.

    python benchmarks/elastic_short.py

A small CNN on the digits, three seeds; accuracy on 300 training images that are held out.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _common import record
from torch.utils.data import DataLoader, TensorDataset

import decomposable as dn
from decomposable.data import digits
from decomposable.elastic import ElasticOptions

WAYS = {
    "half plain, then both in each step, order by data": ElasticOptions(start=0.5, low_steps_per_full=0),
    "both in each step from the start": ElasticOptions(start=0.0, low_steps_per_full=0),
    "in turns from the start": ElasticOptions(start=0.0, low_steps_per_full=1),
}
SIZES = (1.0, 0.5, 0.25, 0.15, 0.1)
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="*", default=[20, 70, 140], help="of 14 steps each")
    args = parser.parse_args()
    x, y = digits.load()[0].tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    train, held_out = order[:-300], order[-300:]
    for epochs in args.epochs:
        for name, options in WAYS.items():
            found = [accuracies(x, y, train, held_out, epochs=epochs, options=options, seed=seed) for seed in SEEDS]
            mean = torch.tensor(found).mean(0).tolist()
            figures = {"way": name, "steps": epochs * (len(train) // 50), "seeds": len(SEEDS)}
            accuracy = {f"{size:g}": round(100 * each, 2) for size, each in zip(SIZES, mean, strict=True)}
            print(figures, accuracy, flush=True)
            record("elastic_short", {**figures, "accuracy": accuracy})


def accuracies(
    x: torch.Tensor,
    y: torch.Tensor,
    train: torch.Tensor,
    held_out: torch.Tensor,
    *,
    epochs: int,
    options: ElasticOptions,
    seed: int,
) -> list[float]:
    """Train once, and return the accuracy at every size."""
    torch.manual_seed(seed)
    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=50, shuffle=True, drop_last=True)
    model = dn.models.small_cnn(widths=(16, 32, 32, 32))
    steps = epochs * len(loader)
    elastic = dn.Elastic(model, example_input=x[:1], steps=steps, from_scratch=True, options=options, seed=seed)
    optimizer = torch.optim.SGD(elastic.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, elastic.learning_rate)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            elastic.backward(forward=lambda net: net(images), loss=lambda out: F.cross_entropy(out, labels))
            optimizer.step()
            scheduler.step()
    net = elastic.finish(loader)
    found = []
    for size in SIZES:
        net.resize_(macs=size)
        found.append(float((net(x[held_out]).argmax(1) == y[held_out]).float().mean()))
    return found


if __name__ == "__main__":
    main()
