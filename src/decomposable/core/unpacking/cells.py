"""One step of time of an LSTM, a GRU and a plain recurrent layer, and the weights that it takes.

Shape suffixes: T steps, B samples, H the state, P what is put out (H, or less where an LSTM has projections), I the
input, G = gates · H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from decomposable.core.standin import StandIn
from decomposable.core.unpacking.parts import ViewLinear

State = tuple[Tensor, ...]
"""h, and of an LSTM c."""

FromState = Callable[[Tensor], Tensor]
"""From h to what it gives to the gates, or to what is put out."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True, eq=False)
class CellWeights:
    """The weights of one layer in one direction, each as the stages of a chain: one of them where it is dense."""

    ih: tuple[Tensor, ...]
    hh: tuple[Tensor, ...]
    hr: tuple[Tensor, ...]  # none without projections
    biases: tuple[Tensor, Tensor] | None  # of ih and of hh

    @classmethod
    def of(cls, ih: nn.Module, hh: nn.Module, hr: nn.Module | None) -> CellWeights | None:
        """Those of layers that do no more than to multiply by them; None where one does, or somebody watches it."""
        stages = [() if layer is None else _stages(layer) for layer in (ih, hh, hr)]
        if any(each is None for each in stages) or modules._has_any_global_hook():
            return None
        biases = ih.bias, hh.bias
        is_pair = all(isinstance(each, Tensor) for each in biases)
        if not is_pair and any(each is not None for each in biases):
            return None
        return cls(ih=stages[0], hh=stages[1], hr=stages[2], biases=biases if is_pair else None)  # type: ignore[arg-type]

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (*self.ih, *self.hh, *self.hr, *(self.biases or ()))


def _stages(layer: nn.Module) -> tuple[Tensor, ...] | None:
    """The weights of a `Linear` or of a chain of them, if its forward is nothing else."""
    if type(layer) is StandIn:
        parts = list(layer._modules.values())
        is_plain = _is_unwatched(layer) and all(type(part) is nn.Linear and _is_unwatched(part) for part in parts)
        has_bias = not is_plain or any(part.bias is not None for part in parts[:-1])
        return None if has_bias else tuple(part.weight for part in parts)  # type: ignore[misc]
    is_plain = type(layer) in (nn.Linear, ViewLinear) and _is_unwatched(layer)
    return (layer.weight,) if is_plain else None  # type: ignore[return-value]


def _is_unwatched(module: nn.Module) -> bool:
    return "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


def chained(x: Tensor, stages: Sequence[Tensor]) -> Tensor:
    """The input multiplied by one stage after the other."""
    for stage in stages:
        x = F.linear(x, stage)
    return x


def from_input(x: Tensor, weights: CellWeights, mode: str) -> Tensor:
    """What the input gives to the gates, at all steps at once; with the biases that can be added there."""
    *before, last = weights.ih
    return F.linear(chained(x, before), last, bias_of_gates(weights, mode))


def bias_of_gates(weights: CellWeights, mode: str) -> Tensor | None:
    """Both biases as one; but of a GRU, the state's is multiplied by a gate, and has to wait."""
    if weights.biases is None:
        return None
    return weights.biases[0] if mode == "GRU" else weights.biases[0] + weights.biases[1]


def step_of(weights: CellWeights, mode: str) -> Callable[[Tensor, State], State]:
    """One step of time, from what `from_input` gives for it and the state before, to the state behind it."""
    *before, last = (each.t() for each in weights.hh)
    bias = weights.biases[1] if weights.biases is not None and mode == "GRU" else None
    hr = weights.hr

    def added(gates_BG: Tensor, h: Tensor) -> Tensor:
        for each in before:
            h = h @ each
        return torch.addmm(gates_BG, h, last)

    def step(gates_BG: Tensor, state: State) -> State:
        h = state[0]
        if mode == "GRU":
            from_state = chained(h, weights.hh)
            return gru(gates_BG, from_state if bias is None else from_state + bias, h)
        state = lstm(added(gates_BG, h), state[1]) if mode == "LSTM" else plain(added(gates_BG, h), mode)
        return (chained(state[0], hr), *state[1:]) if hr else state

    return step


def lstm(total_BG: Tensor, c: Tensor) -> State:
    """As in the documentation of PyTorch, whose letters these are."""
    i, f, g, o = total_BG.chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(from_input_BG: Tensor, from_state_BG: Tensor, h: Tensor) -> State:
    """The same, with the reset gate behind the product with the state."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (each.chunk(3, dim=-1) for each in (from_input_BG, from_state_BG))
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    z = (z_x + z_h).sigmoid()
    return (n + z * (h - n),)  # not lerp: under autocast the first state is of another type


def plain(total_BG: Tensor, mode: str) -> State:
    """The same without gates."""
    return (total_BG.relu() if mode == "RNN_RELU" else total_BG.tanh(),)
