"""`nn.LSTM`, `nn.GRU` and `nn.RNN` with the weights of their gates as layers.

What the input gives is computed for all steps at once; only what the state gives has to wait for the step before. How
the steps run is `recurrence.py`'s, where the layers are plain ones; others, and those with hooks, are called here.

Shape suffixes: T steps, B samples (of a packed batch those that are still going on), H the state, G = gates · H.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from decomposable.core.unpacking import recurrence
from decomposable.core.unpacking.base import Opened
from decomposable.core.unpacking.cells import CellWeights, State, gru, lstm, plain
from decomposable.core.unpacking.parts import PackedWeight
from decomposable_edge.errors import InvalidArgumentError


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
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """Two or three weights for every layer and direction."""
        assert isinstance(module, nn.RNNBase)
        parts = {}
        for name in module._parameters:
            if name.startswith("weight_"):
                bias = name.replace("weight", "bias")
                bias_name = bias if bias in module._parameters else None
                parts[name.removeprefix("weight_")] = PackedWeight(owner=module, weight=name, bias=bias_name)
        return parts

    def flatten_parameters(self) -> None:
        """There is nothing to flatten: a model may ask for it."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As the recurrent layers of PyTorch do it."""
        if isinstance(input, PackedSequence):
            if recurrence.is_recorded():
                raise InvalidArgumentError(
                    f"{self.mode}: got a PackedSequence, whose steps are as wide as its values say; allowed in an "
                    "export: a tensor, padded to one length"
                )
            x, order, is_batched = input.data, input.sorted_indices, True
            sizes: list[int] | None = input.batch_sizes.tolist()
            batch = int(input.batch_sizes[0])
        else:
            sizes, order, is_batched = None, None, input.dim() == 3
            whole = input if is_batched else input.unsqueeze(1)
            x = whole.transpose(0, 1) if self.batch_first and is_batched else whole
            batch = x.shape[1]
        states = self._states(hx, x, batch, is_batched, order)
        return self._result(input, *self._run(x, states, sizes), is_batched)

    def _states(self, hx: Any, like: Tensor, batch: int, is_batched: bool, order: Tensor | None) -> State:
        """The first state of every layer and direction: those given, or zeros."""
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            count = self.num_layers * (2 if self.bidirectional else 1)
            return tuple(like.new_zeros(count, batch, w) for w in widths[: 2 if self.mode == "LSTM" else 1])
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        states = states if is_batched else tuple(each.unsqueeze(1) for each in states)
        return states if order is None else tuple(each.index_select(1, order) for each in states)

    def _run(self, x: Tensor, states: State, sizes: list[int] | None) -> tuple[Tensor, State]:
        """Layer after layer; outputs are those of the last. Of a packed batch, all samples of all steps lie along the
        first axis, and `sizes` are the samples at every step.
        """
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        finals: list[State] = []
        for number in range(self.num_layers):
            ways = []
            for way, suffix in enumerate(suffixes):
                start = tuple(each[number * len(suffixes) + way] for each in states)
                outputs, final = self._direction(x, start, f"l{number}{suffix}", sizes, backwards=way == 1)
                ways.append(outputs)
                finals.append(final)
            x = ways[0] if len(ways) == 1 else torch.cat(ways, dim=-1)
            if self.dropout and self.training and number + 1 < self.num_layers:
                x = F.dropout(x, self.dropout)
        return x, tuple(torch.stack(each) for each in zip(*finals, strict=True))

    def _direction(
        self, x: Tensor, start: State, name: str, sizes: list[int] | None, *, backwards: bool
    ) -> tuple[Tensor, State]:
        """One layer in one direction."""
        ih, hh, hr = (self._modules.get(f"{kind}_{name}") for kind in ("ih", "hh", "hr"))
        assert ih is not None
        assert hh is not None
        weights = CellWeights.of(ih, hh, hr) if sizes is None else None
        if weights is not None:
            return recurrence.run(self.mode, x, start, weights, backwards)
        gates = ih(x).unbind(0) if sizes is None else ih(x).split(sizes)
        state = start if sizes is None else tuple(each[: sizes[-1 if backwards else 0]] for each in start)
        over: list[State] = []
        outputs: list[Tensor] = [gates[0]] * len(gates)
        for at in reversed(range(len(gates))) if backwards else range(len(gates)):
            if sizes is not None:
                state = _going_on(state, start, sizes[at], over)
            state = self._step(gates[at], state, hh, hr)
            outputs[at] = state[0]
        for each in reversed(over):
            state = tuple(torch.cat(pair) for pair in zip(state, each, strict=True))
        return torch.stack(outputs) if sizes is None else torch.cat(outputs), state

    def _step(self, from_input_BG: Tensor, state: State, hh: nn.Module, hr: nn.Module | None) -> State:
        """One step of time, in which the layers are called."""
        from_state_BG = hh(state[0])
        if self.mode == "GRU":
            return gru(from_input_BG, from_state_BG, state[0])
        total_BG = from_input_BG + from_state_BG
        if self.mode != "LSTM":
            return plain(total_BG, self.mode)
        h, c = lstm(total_BG, state[1])
        return (h if hr is None else hr(h)), c

    def _result(self, input: Any, outputs: Tensor, final: State, is_batched: bool) -> Any:
        """Outputs and last states in the form that the input has."""
        if isinstance(input, PackedSequence):
            made: Any = PackedSequence(outputs, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
            if input.unsorted_indices is not None:
                final = tuple(each.index_select(1, input.unsorted_indices) for each in final)
        else:
            made = outputs.transpose(0, 1) if self.batch_first and is_batched else outputs
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
