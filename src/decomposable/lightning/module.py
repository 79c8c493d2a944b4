"""Elastic training, and the joint objective, as a `LightningModule`.

Optimisation is manual, because a step of these adds the gradient itself. What Lightning then leaves to the module is
done here: accumulation, clipping, schedules, and the state that a resumed run needs to repeat exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from decomposable.core.joint import JointObjective
from decomposable.core.networks import Losses
from decomposable.core.tracing import call_with_first
from decomposable.elastic import Elastic
from decomposable_edge.checks import check_count, is_number
from decomposable_edge.errors import InvalidArgumentError

_STATE = "decomposable.joint"


class JointModule(LightningModule):
    """Train a network for all its sizes, as a `LightningModule`.

    Override `outputs` and `loss` where a batch is not (input, label). `configure_optimizers` may return one optimiser,
    with or without a schedule. Evaluation is yours: `validation_step` and the like are Lightning's.

    Args:
        model: the network; its parameters are ``model.…`` in Lightning's checkpoints, by their own names.
        elastic: what `Elastic` is told, such as ``{"from_scratch": True}``. The example is the first training batch,
            and the steps are those of the training: of a loader without a length, say ``{"steps": …}``.
        joint: the options of `JointObjective`, such as ``{"ratio": (0.05, 0.5)}``, in place of elastic training.
        clip_norm: the norm that the gradient of a step is clipped to.
        accumulate: how many batches are one step; its gradient is the mean of theirs. `Trainer` cannot do either in
            manual optimisation: leave its `gradient_clip_val` and `accumulate_grad_batches` as they are.

    Attributes:
        objective: what makes the gradients, an `Elastic` or a `JointObjective`; there from the first step on.
    """

    objective: Elastic | JointObjective

    def __init__(
        self,
        model: nn.Module,
        *,
        elastic: Mapping[str, Any] | None = None,
        joint: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        if clip_norm is not None and (not is_number(clip_norm) or not 0 < clip_norm < math.inf):
            raise InvalidArgumentError.about("clip_norm", clip_norm, "a number above 0, or None")
        if elastic is not None and joint is not None:
            raise InvalidArgumentError("elastic and joint: got both; allowed: one of them")
        self.automatic_optimization = False
        self.model = model
        self.clip_norm, self.accumulate = clip_norm, check_count("accumulate", accumulate)
        self._elastic, self._joint = dict(elastic or {}), joint
        self._saved: Mapping[str, Any] | None = None  # the state of the objective, until there is one

    def _make_objective(self, batch: Any) -> Elastic | JointObjective:
        """Return it with this batch as the example: only now the processes know each other."""
        usual = {"example_input": batch, "forward": self.outputs}
        if self._joint is not None:
            usual = usual if self._joint.get("macs") is not None else {}
            made: Elastic | JointObjective = JointObjective(self.model, **{**usual, **self._joint})
        else:
            made = Elastic(self.model, **{**usual, "steps": self._steps(), **self._elastic})
        if self._saved is not None:
            made.load_state_dict(self._saved)
            self._saved = None
        return made

    def _steps(self) -> int:
        """Return how many batches the training has."""
        trainer = self.trainer
        batches = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs * trainer.num_training_batches
        steps = min(batches, math.inf if trainer.max_steps == -1 else trainer.max_steps * self.accumulate)
        if math.isinf(steps) and "steps" not in self._elastic:
            raise InvalidArgumentError.about("elastic", self._elastic, 'of a training without an end {"steps": …}')
        return 1 if math.isinf(steps) else int(steps)

    def outputs(self, net: nn.Module, batch: Any) -> Any:
        """Return the outputs of a network, full or low-rank, for a batch; by default for its first entry."""
        return call_with_first(net, batch)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the loss of these outputs; by default the cross-entropy to the batch's second entry."""
        if not isinstance(batch, Sequence) or len(batch) < 2:
            allowed = "inputs and labels as a pair, or a loss(self, outputs, batch) of your own"
            raise InvalidArgumentError.about("batch", type(batch).__name__, allowed)
        return F.cross_entropy(outputs, batch[1])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the full network."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Add the gradient of a batch; after the last batch of a step, let the optimiser step."""
        optimizer = self.optimizers()
        if isinstance(optimizer, list):
            raise InvalidArgumentError.about("configure_optimizers", len(optimizer), "one optimiser")
        place, count = self._place(batch_idx)
        if place == 0:
            optimizer.zero_grad()
        precision = self.trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)

        def run(net: nn.Module) -> Any:
            with precision.forward_context():
                return self.outputs(net, batch)

        def loss(outputs: Any) -> Tensor:
            with precision.forward_context():
                return self.loss(outputs, batch)

        # Lightning runs all of this step in mixed precision; gradients and the SVD need the full one.
        with torch.autocast(self.device.type, enabled=False):
            if "objective" not in self.__dict__:
                self.objective = self._make_objective(batch)
            losses = self.objective.backward(forward=run, loss=loss, weight=1 / count, scaler=scaler)
        if place + 1 == count or self.trainer.is_last_batch:
            self._step(optimizer, count / (place + 1))
        self._log(losses)
        return losses.loss

    def _place(self, batch_idx: int) -> tuple[int, int]:
        """Return which batch of its step it is, and how many there are: the last step of an epoch may have fewer."""
        place, batches = batch_idx % self.accumulate, self.trainer.num_training_batches
        left = math.inf if math.isinf(batches) else batches - (batch_idx - place)
        return place, int(min(self.accumulate, left))

    def _step(self, optimizer: Any, factor: float) -> None:
        if factor != 1:  # a loader without a length ended early: each batch was weighted for a full step
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        optimizer.step()
        self._step_schedules("step")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Clip, after a scaler has taken its factor out of the gradient; call it where you override it."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)

    def on_train_epoch_end(self) -> None:
        """Step the schedules that go by epochs; call it where you override it."""
        self._step_schedules("epoch")

    def _step_schedules(self, interval: str) -> None:
        for config in self.trainer.lr_scheduler_configs:
            done = self.trainer.global_step if interval == "step" else self.current_epoch + 1
            if config.interval == interval and done % config.frequency == 0:
                config.scheduler.step()

    def _log(self, losses: Losses) -> None:
        self.log_dict({f"train/{name}": float(value) for name, value in losses.seen().items() if name != "ratio"})

    def on_fit_start(self) -> None:
        """Refuse what cannot be trained or stepped here; every training has an objective of its own."""
        strategy = type(self.trainer.strategy).__name__
        if self.trainer.world_size > 1 and strategy != "DDPStrategy":
            raise InvalidArgumentError.about("strategy", strategy, "ddp, or one device")
        for config in self.trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                allowed = "schedules by step or epoch"
                raise InvalidArgumentError.about("configure_optimizers", "ReduceLROnPlateau", allowed)
        self.__dict__.pop("objective", None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save also the state of the objective, and that of every process's random numbers, on the CPU and the GPUs."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        random = [{"cpu": torch.get_rng_state(), "gpus": gpus}]
        if dist.is_available() and dist.is_initialized():
            random = random * dist.get_world_size()
            dist.all_gather_object(random, random[0])
        state = self.objective.state_dict() if "objective" in self.__dict__ else self._saved
        checkpoint[_STATE] = {"joint": state, "random": random}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the same where a training continues; who only evaluates the weights does not need it."""
        if _STATE not in checkpoint:
            raise InvalidArgumentError.about("checkpoint", "one of another module", "one that a JointModule wrote")
        trainer = self._trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        self._saved, random = checkpoint[_STATE]["joint"], checkpoint[_STATE]["random"]
        # Here already: the loader of the next epoch draws first.
        own = random[trainer.global_rank if trainer.global_rank < len(random) else 0]
        torch.set_rng_state(own["cpu"].cpu())
        gpus = [state.cpu() for state in own["gpus"]]
        if torch.cuda.is_available() and len(gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpus)
