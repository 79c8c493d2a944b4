"""An elastic training by `JointModule`, by one process or several: `python two_processes.py FOLDER RANK`."""

import os
import sys
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import nn

from decomposable.elastic import ElasticOptions
from decomposable.lightning import JointModule

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(1))


class Small(JointModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


def trained(folder: Path, *, scratch: bool, processes: int = 1, epochs: int = 2, resume: Path | None = None):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
    # An order by data would be one of the images of the first process.
    options = ElasticOptions(macs=(0.4, 0.9), refresh=2, order="weights")
    module = Small(model, elastic={"from_scratch": scratch, "options": options, "seed": 5, "steps": 8})
    data = torch.utils.data.TensorDataset(X, Y)
    rank = int(os.environ["LOCAL_RANK"]) if processes > 1 else 0
    sampler = torch.utils.data.DistributedSampler(data, processes, rank, shuffle=False)  # Lightning's own would shuffle
    loader = torch.utils.data.DataLoader(data, batch_size=8 // processes, sampler=sampler)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(folder / f"after-{epochs}.ckpt")
    return {name: value.detach().clone() for name, value in model.named_parameters()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {f"{scratch}": trained(out, scratch=scratch, processes=2) for scratch in (False, True)}
    trained(out, scratch=True, processes=2, epochs=1)
    found["resumed"] = trained(out, scratch=True, processes=2, resume=out / "after-1.ckpt")
    torch.save(found, out / f"weights-{os.environ['LOCAL_RANK']}.pt")
    os._exit(0)  # at the end of a busy machine's process, gloo's threads may abort it
