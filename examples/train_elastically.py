"""Train your own model for all its sizes, in your own loop: elastic training.

    python examples/train_elastically.py

The model stays an ordinary module: `Elastic` computes gradients, your optimiser steps. The data are made up, so nothing
is downloaded: images whose class is the position of a bright bar.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decomposable as dn


def make_batch(size: int = 64) -> tuple[Tensor, Tensor]:
    """Noise with one brighter row; its index is the label."""
    labels = torch.randint(0, 8, (size,))
    images = torch.randn(size, 1, 8, 8)
    images[torch.arange(size), 0, labels] += 1.5
    return images, labels


def main() -> None:
    """Train for 80 steps from scratch, and measure three sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, 8)),
    )
    steps = 80
    elastic = dn.Elastic(model, example_input=make_batch(1)[0], steps=steps, from_scratch=True)
    optimizer = torch.optim.SGD(elastic.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, elastic.learning_rate)
    for step in range(steps):
        x, y = make_batch()
        optimizer.zero_grad()
        result = elastic.backward(forward=lambda net, x=x: net(x), loss=lambda out, y=y: F.cross_entropy(out, y))  # type: ignore[misc]
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            low = f", at {result.macs:.0%} of the MACs {result.low:.3f}" if result.ran == "both" else ""
            print(f"step {step + 1}: loss {result.loss:.3f}{low}")

    net = elastic.finish([make_batch(500)])
    x, y = make_batch(500)
    for size in (1.0, 0.5, 0.25):
        net.resize_(macs=size)
        with torch.no_grad():
            correct = (net(x).argmax(1) == y).float().mean()
        print(f"{size:.2f} of the MACs: {correct:.1%} correct")


if __name__ == "__main__":
    main()
