"""Elastic training, and the joint objective, in the `Trainer` of Hugging Face.

Batches, schedules, clipping, logging, checkpoints and mixed precision are those of the Trainer. Only what it does for
one batch (forward, loss, backward) is `Elastic.backward` or `JointObjective.backward` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

from decomposable.core.distillation import kl_divergence, logits_of
from decomposable.core.joint import JointObjective
from decomposable.core.networks import Losses
from decomposable.elastic import Elastic
from decomposable.training.state_file import read_state, write_state
from decomposable_edge.errors import InvalidArgumentError

STATE = "joint.safetensors"
"""The file of a checkpoint that holds the state of the objective."""


class JointTrainer(Trainer):
    """Train a network for all its sizes, as a `Trainer`: elastically, or by the paper's joint objective.

    Args:
        elastic: what `Elastic` is told, such as ``{"from_scratch": True}``; the example is the first training batch,
            and the steps are those of the training.
        joint: the options of `JointObjective`, such as ``{"ratio": (0.05, 0.5)}``, in place of elastic training. Where
            `macs` is given without `example_input`, the first training batch is the example.
        args, kwargs: those of `Trainer`.

    The usual distance of elastic training is the KL divergence at the positions that have a label. From trained weights
    its two networks take turns from batch to batch, so that with gradient accumulation a step may have both.
    """

    def __init__(
        self,
        *args: Any,
        elastic: Mapping[str, Any] | None = None,
        joint: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse_sharded(self)
        if elastic is not None and joint is not None:
            raise InvalidArgumentError("elastic and joint: got both; allowed: one of them")
        self._elastic, self._joint = dict(elastic or {}), joint
        self._distance = self._elastic.get("distance") or self._kl_at_labels
        self._share = 1.0  # of the batch in its step, for what the Trainer has not scaled
        self._labels: Tensor | None = None
        self._sums: dict[str, list[float]] = {}
        self._objective: Elastic | JointObjective | None = None
        if not self._needs_example and joint is not None:
            self._objective = self._make_objective(None)  # so that wrong options are refused here

    @property
    def _needs_example(self) -> bool:
        options = self._elastic if self._joint is None else self._joint
        is_by_macs = self._joint is None or self._joint.get("macs") is not None
        return is_by_macs and options.get("example_input") is None

    @property
    def objective(self) -> Elastic | JointObjective:
        """Return what makes the gradients, around the model that is trained: every training has its own."""
        return self._objective_with(None)

    def _objective_with(self, batch: Mapping[str, Any] | None) -> Elastic | JointObjective:
        if self._objective is None or self._objective.model is not self.model:
            if not self._needs_example:
                batch = None
            elif batch is None:  # asked for before the first step
                with torch.random.fork_rng(devices=[]):
                    batch = self._prepare_inputs(next(iter(self.get_train_dataloader())))
            self._objective = self._make_objective(batch)
        return self._objective

    def _make_objective(self, batch: Mapping[str, Any] | None) -> Elastic | JointObjective:
        usual = {"forward": lambda net, batch: net(**batch), "seed": self.args.seed}
        if batch is not None:
            usual["example_input"] = batch
        if self._joint is not None:
            return JointObjective(self.model, **{**usual, **self._joint})
        steps = max(1, self.state.max_steps) * self.args.gradient_accumulation_steps
        return Elastic(self.model, **{**usual, "steps": steps, **self._elastic, "distance": self._distance_of_pairs})

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does; afterwards the model is called in the precision of its weights again."""
        if isinstance(self._objective, Elastic):
            self._objective = None  # its phases are those of one training
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
        losses = self._objective_with(inputs).backward(
            forward=run,
            loss=lambda pair: pair[0],
            weight=weight,
            scaler=self.accelerator.scaler,
            samples=1,  # every process counts the same: the Trainer has divided its loss by the items of all
        )
        self._note(losses, steps if is_scaled else 1)
        return losses.loss.detach() * weight

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
        seen = losses.seen()
        for name in ("loss", "loss_low", "macs", "params"):
            if name in seen:
                value = float(seen[name]) * (steps if name.startswith("loss") else 1)
                self._sums.setdefault("loss_full" if name == "loss" else name, []).append(value)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer` does, with the means of both losses and of the sizes since the last time."""
        if "loss" in logs:
            logs |= {name: round(sum(values) / len(values), 6) for name, values in self._sums.items()}
            self._sums = {}
        super().log(logs, *args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save also the state of the objective, which the first process has for all."""
        super()._save_rng_state(output_dir)
        if self.args.process_index == 0:
            write_state(Path(output_dir) / STATE, self.objective.state_dict())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the same."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.objective.load_state_dict(read_state(Path(checkpoint) / STATE))


def _without_cache(outputs: Any) -> Any:
    """Return the outputs without keys and values, which would keep the whole graph."""
    if not isinstance(outputs, Mapping):
        return outputs
    kept = {name: value for name, value in outputs.items() if name != "past_key_values"}
    return type(outputs)(**kept) if isinstance(outputs, ModelOutput) else kept


def _refuse_sharded(trainer: Trainer) -> None:
    args = trainer.args
    if args.n_gpu > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        came = f"a process with {args.n_gpu} GPUs, DeepSpeed or FSDP"
        allowed = "processes with one device each"
        raise InvalidArgumentError.about("args", came, allowed, f"JointTrainer: {came}; allowed: {allowed}")
