"""One training step of a method on fresh weights, to be timed: for a dry run, and for section 4.4 of the paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decomposable.recipes import Task
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.devices import seed_everything
from decomposable.training.loop import moved, parameter_groups
from decomposable.training.methods.base import Paced
from decomposable.training.methods.flat import with_overrides

_STEPS = 10_000  # of the training that a timed step is thought to be in


def fresh_model(task: Task, settings: Settings, device: torch.device) -> nn.Module:
    """Return the recipe's model with weights of the settings' seed, as a training begins with it."""
    seed_everything(settings.seed)
    model = task.build_model().to(device)
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


class Stepper:
    """Hold a method with some settings and a model of its own; a call makes a whole step with a batch."""

    def __init__(self, task: Task, settings: Settings, example_input: Tensor, device: torch.device) -> None:
        if settings.method == "elastic":  # no training lies behind a timed step, whose data could say an order
            settings = with_overrides(settings, elastic_order="weights")
        self._task, self._settings, self._device = task, settings, device
        method = methods.find(settings.method)
        model, example = fresh_model(task, settings, device), example_input.to(device)
        network = method.network(model, example, settings, is_trained=False).to(device).train()
        self._step = method.step(network, settings)
        groups = parameter_groups(network, settings.weight_decay)
        self._optimizer = torch.optim.SGD(groups, lr=1e-6, momentum=settings.momentum)

    @property
    def is_paced(self) -> bool:
        """Return whether a step early in a training is another one than late."""
        return isinstance(self._step, Paced)

    @property
    def refresh(self) -> int:
        """Return how many steps share the bases that the first of them computes."""
        return getattr(self._step, "refresh", 1)

    def __call__(self, batch: Any, done: float) -> None:
        """Make a step when this part of the training is done."""
        if isinstance(self._step, Paced):
            self._step.at(round(done * _STEPS), _STEPS)
        on_device = moved(batch, self._device, self._settings)
        self._optimizer.zero_grad()
        self._step.backward(lambda net: self._task.loss(net, on_device))
        self._optimizer.step()
        if self._device.type == "cuda":  # else the call would end before the step
            torch.cuda.synchronize(self._device)
