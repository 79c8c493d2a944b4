"""Train your own model with the joint objective, in your own loop.

    python examples/train_jointly.py

The model below stays an ordinary module: the objective computes gradients, your optimiser steps. The data are made up,
so nothing is downloaded: images whose class is the position of a bright bar.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decomposable as dn
from decomposable.core.networks import Losses


class SmallNet(nn.Module):
    """Any module will do; this one has a residual connection."""

    def __init__(self, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))


def make_batch(size: int = 64) -> tuple[Tensor, Tensor]:
    """Noise with one brighter row; its index is the label."""
    labels = torch.randint(0, 8, (size,))
    images = torch.randn(size, 1, 8, 8)
    images[torch.arange(size), 0, labels] += 1.5
    return images, labels


def step(joint: dn.JointObjective, optimizer: torch.optim.Optimizer, *batches: tuple[Tensor, Tensor]) -> Losses:
    """One update; the losses of its last batch come back. The gradients of several batches accumulate as usual."""
    optimizer.zero_grad()
    for x, y in batches:
        # The closure runs twice, with the model and with its low-rank network: use the network it is given.
        losses = joint.backward(lambda net, x=x, y=y: F.cross_entropy(net(x), y))  # type: ignore[misc]
    if len(batches) > 1:
        for parameter in joint.model.parameters():
            parameter.grad /= len(batches)  # the mean; dividing the loss in the closure does the same
    optimizer.step()
    return losses


def main() -> None:
    """Train for 60 steps, the last 20 of them with gradient accumulation, and compare three sizes."""
    torch.manual_seed(0)
    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    joint = dn.JointObjective(model, form="spatial", ratio=(0.01, 0.5), balance=0.5)

    for i in range(60):
        if i < 40:
            losses = step(joint, optimizer, make_batch(64))
        else:
            losses = step(joint, optimizer, make_batch(32), make_batch(32))  # two halves, one update
        if i % 10 == 0:
            print(f"step {i:2}: loss {losses.full:.3f} full, {losses.low:.3f} with {losses.ratio:.0%} of the bases")

    model.eval()
    x, y = make_batch(500)
    net = dn.decompose(model, example_input=x[:1])
    net.calibrate_([make_batch(500)])
    for size in (1.0, 0.5, 0.25):
        net.resize_(macs=size)
        with torch.no_grad():
            correct = (net(x).argmax(1) == y).float().mean()
        print(f"{size:.2f} of the MACs: {correct:.1%} correct")


if __name__ == "__main__":
    main()
