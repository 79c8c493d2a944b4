"""Your own model and data in the ready loop: progress, checkpoints, resuming, the artifact and its table of sizes.

    decomposable train examples.own_recipe:stripes --out runs/stripes --set epochs=10
    python examples/own_recipe.py [folder]

The images here are stripes in four directions under noise, made on the spot; yours come from where you keep them.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import decomposable as dn
from decomposable.data.base import FromDatasets

CLASSES = 4


class Stripes(Dataset):
    """Any map-style data set of (input, label) pairs will do, with whatever transforms it has."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        self.phases = torch.rand(count, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        angle = torch.tensor(torch.pi / CLASSES * int(self.labels[index]))
        y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        wave = torch.sin(x * torch.cos(angle) + y * torch.sin(angle) + 6.28 * self.phases[index])
        # A random transform: the loop seeds it for every batch, so that a resumed run sees the same noise.
        return (wave + 1.5 * torch.randn(12, 12))[None], int(self.labels[index])


def network() -> nn.Module:
    """Any module will do; it stays as it is."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


# What the recipe runs with unless `--set` says otherwise; all that is not named here is the paper's for CIFAR.
SETTINGS = dn.recipes.Settings(
    epochs=4,
    batch_size=32,
    schedule="cosine",
    calibration_images=256,
    sizes=(1, 0.5, 0.25),
)


def stripes(data: Path | None, settings: dn.recipes.Settings = SETTINGS) -> dn.recipes.Task:
    """A recipe: a function of the folder given with --data (not needed here) and the settings."""
    return dn.recipes.Task(
        build_model=network,
        load_data=lambda: FromDatasets(classes=CLASSES, train=Stripes(512, seed=0), test=Stripes(256, seed=1)),
    )


def main(folder: Path) -> None:
    """The same from Python."""
    record = dn.train(stripes, out=folder / "run", say=print)
    for row in record["sizes"]:
        print(f"{row['size']:4g} of the MACs: {row['params']:6,} parameters, {row['accuracy']:5.1f}% right")

    net = dn.load(folder / "run" / "network.safetensors", model=network())
    print(net.resize_(macs=0.4))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
