"""A small network trained for all its sizes in PyTorch Lightning.

    python examples/lightning_module.py        (the extra lightning)

The data are random points in four heaps; what is shown is the use.
"""

import logging
import tempfile
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
from lightning.pytorch import Trainer  # noqa: E402

from decomposable.lightning import JointModule  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Heaps(JointModule):
    """Only what is one's own: the optimiser and its schedule."""

    def configure_optimizers(self) -> dict[str, object]:
        """SGD, its rate falling from step to step."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=160)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: str) -> None:
    """Train, resize, measure."""
    torch.manual_seed(0)
    centres = 1.5 * torch.randn(4, 32)
    labels = torch.arange(1024) % 4
    points = centres[labels] + torch.randn(1024, 32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(points, labels), batch_size=32, shuffle=True)

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    module = Heaps(model, elastic={"from_scratch": True}, clip_norm=1.0, accumulate=2)
    Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module, loader)

    net = module.objective.finish(loader)
    for size in (1.0, 0.5, 0.2):
        net.resize_(macs=size)
        with torch.no_grad():
            right = (net(points).argmax(dim=1) == labels).float().mean()
        print(f"{size:g}x of the MACs: {100 * right:.1f}% right")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(made)
