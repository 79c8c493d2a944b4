"""`nn.LSTM`, `nn.GRU` and `nn.RNN` with the weights of their gates as layers, and a plain loop over time.

What the input gives is computed for all steps at once; only what the state gives has to wait for the step before.

Shape suffixes: T steps, B samples (of a packed batch those that are still going on), H the state, G = gates · H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from decomposable.core.opening.base import Opened
from decomposable.core.opening.parts import Part

State = tuple[Tensor, ...]
"""h, and of an LSTM c."""


class OpenedRecurrent(Opened):
    """Layers ih_l0, hh_l0 (and hr_l0 of an LSTM with projections) for every layer and direction."""

    mode: str
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    dropout: float

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Nothing is in the way of the plain kinds."""
        if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        return None

    @classmethod
    def parts(cls, module: nn.Module) -> dict[str, Part]:
        """Two or three weights for every layer and direction."""
        assert isinstance(module, nn.RNNBase)
        parts = {}
        for name in module._parameters:
            if name.startswith("weight_"):
                bias = name.replace("weight", "bias")
                bias_name = bias if bias in module._parameters else None
                parts[name.removeprefix("weight_")] = Part(owner=module, weight=name, bias=bias_name)
        return parts

    def flatten_parameters(self) -> None:
        """There is nothing to flatten: a model may ask for it."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As the recurrent layers of PyTorch do it."""
        is_packed = isinstance(input, PackedSequence)
        is_batched = is_packed or input.dim() == 3
        if is_packed:
            sizes = input.batch_sizes.tolist()
            steps, batch = list(input.data.split(sizes)), sizes[0]
        else:
            sizes = None
            whole = input if is_batched else input.unsqueeze(1)
            x_TBI = whole.transpose(0, 1) if self.batch_first and is_batched else whole
            steps, batch = list(x_TBI.unbind(0)), x_TBI.shape[1]
        states = self._states(hx, steps[0], batch, is_batched, input.sorted_indices if is_packed else None)
        outputs, final = self._run(steps, states, sizes)
        return self._result(input, outputs, final, is_batched)

    def _states(self, hx: Any, like: Tensor, batch: int, is_batched: bool, order: Tensor | None) -> State:
        """The first state of every layer and direction: those given, or zeros."""
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            count = self.num_layers * (2 if self.bidirectional else 1)
            return tuple(like.new_zeros(count, batch, w) for w in widths[: 2 if self.mode == "LSTM" else 1])
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        states = states if is_batched else tuple(each.unsqueeze(1) for each in states)
        return states if order is None else tuple(each.index_select(1, order) for each in states)

    def _run(self, steps: list[Tensor], states: State, sizes: list[int] | None) -> tuple[list[Tensor], State]:
        """Layer after layer; outputs are those of the last, step by step."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        finals: list[State] = []
        for number in range(self.num_layers):
            ways = []
            for way, suffix in enumerate(suffixes):
                start = tuple(each[number * len(suffixes) + way] for each in states)
                outputs, final = self._direction(steps, start, f"l{number}{suffix}", sizes, backwards=way == 1)
                ways.append(outputs)
                finals.append(final)
            steps = ways[0] if len(ways) == 1 else [torch.cat(both, dim=-1) for both in zip(*ways, strict=True)]
            if self.dropout and self.training and number + 1 < self.num_layers:
                steps = [F.dropout(step, self.dropout) for step in steps]
        return steps, tuple(torch.stack(each) for each in zip(*finals, strict=True))

    def _direction(
        self, steps: list[Tensor], start: State, name: str, sizes: list[int] | None, *, backwards: bool
    ) -> tuple[list[Tensor], State]:
        """One layer in one direction; `sizes` are the samples at every step, of a packed batch."""
        layer = self.layer(f"ih_{name}")
        gates = layer(torch.stack(steps)).unbind(0) if sizes is None else layer(torch.cat(steps)).split(sizes)
        state = start if sizes is None else tuple(each[: sizes[-1 if backwards else 0]] for each in start)
        over: list[State] = []
        outputs: list[Tensor] = [gates[0]] * len(steps)
        for at in reversed(range(len(steps))) if backwards else range(len(steps)):
            if sizes is not None:
                state = _going_on(state, start, sizes[at], over)
            state = self._step(gates[at], state, name)
            outputs[at] = state[0]
        for each in reversed(over):
            state = tuple(torch.cat(pair) for pair in zip(state, each, strict=True))
        return outputs, state

    def _step(self, from_input_BG: Tensor, state: State, name: str) -> State:
        """One step of time (as in the documentation of PyTorch, whose letters these are)."""
        h = state[0]
        from_state_BG = self.layer(f"hh_{name}")(h)
        if self.mode == "LSTM":
            i, f, g, o = (from_input_BG + from_state_BG).chunk(4, dim=-1)
            c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            return (self.layer(f"hr_{name}")(h) if self.proj_size else h), c
        if self.mode == "GRU":
            (r_x, z_x, n_x), (r_h, z_h, n_h) = (each.chunk(3, dim=-1) for each in (from_input_BG, from_state_BG))
            n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
            z = (z_x + z_h).sigmoid()
            return (n + z * (h - n),)  # not lerp: under autocast the first state is of another type
        total = from_input_BG + from_state_BG
        return (total.relu() if self.mode == "RNN_RELU" else total.tanh(),)

    def _result(self, input: Any, outputs: Sequence[Tensor], final: State, is_batched: bool) -> Any:
        """Outputs and last states in the form that the input has."""
        if isinstance(input, PackedSequence):
            made: Any = PackedSequence(
                torch.cat(list(outputs)), input.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
            if input.unsorted_indices is not None:
                final = tuple(each.index_select(1, input.unsorted_indices) for each in final)
        else:
            made = torch.stack(list(outputs), dim=1 if self.batch_first and is_batched else 0)
            if not is_batched:
                made, final = made.squeeze(1), tuple(each.squeeze(1) for each in final)
        return made, final if self.mode == "LSTM" else final[0]


def _going_on(state: State, start: State, size: int, over: list[State]) -> State:
    """The state of those samples of a packed batch that have this step: they are sorted by length, the shortest last.

    Those that end here go to `over`; those that begin here, where the loop runs backwards, have their first state.
    """
    before = len(state[0])
    if size < before:
        over.append(tuple(each[size:] for each in state))
        return tuple(each[:size] for each in state)
    if size > before:
        return tuple(torch.cat([each, new[before:size]]) for each, new in zip(state, start, strict=True))
    return state
