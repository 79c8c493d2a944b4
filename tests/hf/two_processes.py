"""An elastic training by `JointTrainer`, by one process or several: `python two_processes.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
import transformers

from decomposable.elastic import ElasticOptions
from decomposable.hf import JointTrainer


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = (torch.arange(9) * (1 + index % 3) + index) % 40
        return {"input_ids": tokens, "labels": tokens}


def trained(folder: Path, *, scratch: bool, steps: int = 8, resume: str | None = None):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4 // processes,
        max_steps=steps,
        learning_rate=1e-2,
        optim="sgd",
        save_strategy="steps",
        save_steps=6,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
    )
    elastic = {"from_scratch": scratch, "options": ElasticOptions(macs=(0.5, 0.9), refresh=2, order="weights")}
    made = JointTrainer(model=transformers.GPT2LMHeadModel(config), args=args, train_dataset=Texts(), elastic=elastic)
    made.train(resume_from_checkpoint=resume)
    return {name: value.detach().clone() for name, value in made.model.named_parameters()}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {f"{scratch}": trained(out / f"run-{scratch}", scratch=scratch) for scratch in (False, True)}
    found["resumed"] = trained(out / "run-True", scratch=True, resume=str(out / "run-True" / "checkpoint-6"))
    torch.save(found, out / f"weights-{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
