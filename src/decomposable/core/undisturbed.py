"""Passes of a model that leave no trace: in torch's random numbers, in the model's buffers, in its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def remembered(model: nn.Module) -> Callable[[], None]:
    """A function that takes the model's buffers and torch's random numbers back to what they are now."""
    held = [(module, dict(module._buffers)) for module in model.modules()]
    buffers = {id(b): b for _, own in held for b in own.values() if b is not None and not is_lazy(b)}
    values = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    random = torch.get_rng_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    random_there = {device: torch.cuda.get_rng_state(device) for device in devices}

    @torch.no_grad()
    def restore() -> None:
        for key, buffer in buffers.items():
            buffer.copy_(values[key])
        for module, own in held:
            module._buffers.update({name: b for name, b in own.items() if b is None or not is_lazy(b)})
        torch.set_rng_state(random)
        for device, state in random_there.items():
            torch.cuda.set_rng_state(state, device)

    return restore


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Passes inside draw no random numbers, and what they write to buffers is undone."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
