"""The joint objective around DistributedDataParallel, in your own loop: one process, several GPUs or several machines.

    python examples/several_processes.py
    torchrun --nproc-per-node 2 examples/several_processes.py

Every process has its part of each batch. The last batch does not come out even, and one process may have none of it:
that is said, and the update is that of one process with the whole batch.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decomposable as dn

IMAGES, BATCH = 257, 64


def network() -> nn.Module:
    """Any module; its normalisation looks at one image at a time, so that parts of a batch give what the whole does."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 8)
    )


def make_data() -> tuple[Tensor, Tensor]:
    """Noise with one brighter row, whose index is the label; the same on all processes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 8, (IMAGES,), generator=generator)
    images = torch.randn(IMAGES, 1, 8, 8, generator=generator)
    images[torch.arange(IMAGES), 0, labels] += 1.5
    return images, labels


def main() -> None:
    """Three epochs; the first process tells how they went."""
    index, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        dist.init_process_group("gloo")  # "nccl" on GPUs, and model.to(device)
    torch.manual_seed(0)
    model = network()
    joint = dn.JointObjective(DistributedDataParallel(model) if count > 1 else model, ratio=(0.05, 0.5), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = make_data()
    for epoch in range(3):
        for numbers in torch.arange(IMAGES).split(BATCH):
            own = numbers[index::count]
            x, y = images[own], labels[own]
            optimizer.zero_grad()
            # len(own) says how much this part counts; of none the closure is not called.
            losses = joint.backward(lambda net, x=x, y=y: F.cross_entropy(net(x), y), samples=len(own))  # type: ignore[misc]
            optimizer.step()
        if index == 0:
            print(f"epoch {epoch + 1}: loss {losses.full:.3f}, of the low-rank network {losses.low:.3f}")
    if count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
