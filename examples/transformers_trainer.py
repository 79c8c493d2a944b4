"""A GPT-2 of Hugging Face Transformers, trained for all its sizes by the `Trainer`, then resized, and kept as a folder.

    python examples/transformers_trainer.py        (the extra hf)

The model is small and its text is a counting rhyme; what is shown is the use.
"""

import tempfile
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
import transformers  # noqa: E402

from decomposable.hf import JointTrainer, from_pretrained, save_pretrained  # noqa: E402

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Counting(torch.utils.data.Dataset):
    """Sequences of 16 that count up from somewhere, modulo 24."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 24
        return {"input_ids": tokens, "labels": tokens}


def main(folder: Path) -> None:
    """Train, resize, generate, keep."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=32, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=8,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="no",
    )
    trainer = JointTrainer(
        model=transformers.GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Counting(),
        elastic={"from_scratch": True},
    )
    trainer.train()

    batch = torch.utils.data.default_collate([Counting()[i] for i in range(8)])
    net = trainer.objective.finish([batch])
    start = torch.tensor([[3, 4, 5]])
    for size in (1.0, 0.6, 0.4):
        net.resize_(macs=size)
        with torch.no_grad():
            loss = net(**batch).loss
        written = net.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=5, do_sample=False)
        print(f"{size:g}x: loss {loss:.3f}, it counts on {written[0, 3:].tolist()}")

    save_pretrained(net, folder / "small")
    small = from_pretrained(folder / "small")
    with torch.no_grad():
        print("from the folder the same:", torch.equal(small(**batch).logits, net(**batch).logits))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
