"""The joint objective in the `Trainer` of Hugging Face.

Batches, schedules, clipping, logging, checkpoints and mixed precision are those of the Trainer. Only what it does for
one batch (forward, loss, backward) is `JointObjective.backward` here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from decomposable.core.distillation import kl_divergence, logits_of
from decomposable.core.joint import JointObjective, Losses
from decomposable.training.state_file import read_state, write_state
from decomposable_edge.errors import InvalidArgumentError

STATE = "joint.safetensors"
"""The file of a checkpoint that holds the state of the objective."""


class JointTrainer(Trainer):
    """Train a network for all its sizes, as a `Trainer`.

    Args:
        joint: the options of `JointObjective`, such as ``{"ratio": (0.05, 0.5)}`` or, as in the method elastic,
            ``{"macs": (0.1, 0.7), "distill": 1.0, "turns": True, "refresh": 8, "smallest": 0.1}``. Where `macs` is
            given without `example_input`, the first training batch is the example.
        args, kwargs: those of `Trainer`.

    The distance of `distill` is by default the KL divergence at the positions that have a label. With `turns`, the two
    networks take turns from batch to batch, so that with gradient accumulation a step may have both.
    """

    def __init__(self, *args: Any, joint: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_parallel(self)
        self._options = dict(joint or {})
        own = self._options.get("distance")
        self._distance = own if own is not None else self._kl_at_labels
        if self._options.get("distill"):
            self._options["distance"] = self._distance_of_pairs
        self._share = 1.0  # of the batch in its step, for what the Trainer has not scaled
        self._labels: Tensor | None = None
        self._sums: dict[str, list[float]] = {}
        self._joint: JointObjective | None = None
        if not self._needs_example:
            self._joint = self._objective(None)  # so that wrong options are refused here

    @property
    def _needs_example(self) -> bool:
        return self._options.get("macs") is not None and self._options.get("example_input") is None

    @property
    def joint(self) -> JointObjective:
        """Return the objective around the model that is trained: with `model_init`, every training has its own."""
        return self._joint_with(None)

    def _joint_with(self, batch: Mapping[str, Any] | None) -> JointObjective:
        if self._joint is None or self._joint.model is not self.model:
            self._joint = self._objective(batch)
        return self._joint

    def _objective(self, batch: Mapping[str, Any] | None) -> JointObjective:
        options = {"forward": lambda net, batch: net(**batch), "seed": self.args.seed, **self._options}
        if self._needs_example:
            if batch is None:  # asked for before the first step
                with torch.random.fork_rng(devices=[]):
                    batch = self._prepare_inputs(next(iter(self.get_train_dataloader())))
            options["example_input"] = batch
        return JointObjective(self.model, **options)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does; afterwards the model is called in the precision of its weights again."""
        result = super().train(*args, **kwargs)
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return result

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradient of one batch to every parameter's `.grad`, and return the loss as `Trainer` does."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        is_scaled = self._is_scaled(num_items_in_batch)
        steps = self.current_gradient_accumulation_steps
        self._share = 1 / steps if is_scaled else 1.0
        labels = inputs.get("labels")
        self._labels = labels if isinstance(labels, Tensor) else None

        def run(net: nn.Module) -> tuple[Tensor, Any]:
            with self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(
                    net, dict(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch
                )
            return loss, _without_cache(outputs)

        weight = 1.0 if is_scaled else 1 / steps
        losses = self._joint_with(inputs).backward(
            forward=run, loss=lambda pair: pair[0], weight=weight, scaler=self.accelerator.scaler
        )
        self._note(losses, steps if is_scaled else 1)
        shown = losses.full if not losses.full.isnan() else losses.low
        return shown.detach() * weight

    def _is_scaled(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Return whether the loss is already divided by the items of the whole step, as `Trainer` decides it."""
        if getattr(self, "loss_is_scaled_for_ga", None) is not None:
            return bool(self.loss_is_scaled_for_ga)
        by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return bool(by_model or self.compute_loss_func is not None)

    def _distance_of_pairs(self, low: Any, full: Any) -> Tensor:
        """Return the distance of the outputs; the first of each pair is the loss."""
        found: Tensor = self._distance(low[1], full[1]) * self._share
        return found

    def _kl_at_labels(self, low: Any, full: Any) -> Tensor:
        """Return KL(full ‖ low) where there is a label; of a causal model, where there is one for the next token."""
        one, other, labels = logits_of(low), logits_of(full), self._labels
        if labels is None or one.dim() != 3 or labels.shape != one.shape[:-1]:
            return kl_divergence(one.flatten(0, -2), other.flatten(0, -2))
        kinds = {kind.__name__ for kind in type(self.accelerator.unwrap_model(self.model)).__mro__}
        if not kinds.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):  # a subclass, too
            one, other, labels = one[:, :-1], other[:, :-1], labels[:, 1:]
        counts = labels != -100
        return kl_divergence(one[counts], other[counts]) if counts.any() else one.sum() * 0

    def _note(self, losses: Losses, steps: int) -> None:
        values = {"loss_full": float(losses.full) * steps, "loss_low": float(losses.low) * steps}
        for name, value in {**values, "macs": losses.macs, "params": losses.params}.items():
            if not math.isnan(value):
                self._sums.setdefault(name, []).append(value)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer` does, with the means of both losses and of the sizes since the last time."""
        if "loss" in logs:
            logs |= {name: round(sum(values) / len(values), 6) for name, values in self._sums.items()}
            self._sums = {}
        super().log(logs, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save also the generator of the sizes, and what the objective keeps."""
        super()._save_rng_state(output_dir)
        write_state(Path(output_dir) / STATE, self.joint.state_dict())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the same."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.joint.load_state_dict(read_state(Path(checkpoint) / STATE))


def _without_cache(outputs: Any) -> Any:
    """Return the outputs without keys and values, which would keep the whole graph."""
    if not isinstance(outputs, Mapping):
        return outputs
    kept = {name: value for name, value in outputs.items() if name != "past_key_values"}
    return type(outputs)(**kept) if isinstance(outputs, ModelOutput) else kept


def _refuse_parallel(trainer: Trainer) -> None:
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        came = f"{args.world_size} processes with {args.n_gpu} GPUs each, or DeepSpeed or FSDP"
        raise InvalidArgumentError.about(
            "args", came, "one process with one device", f"JointTrainer: {came}; allowed: one process with one device"
        )
