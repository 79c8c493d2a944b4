"""`nn.LSTM`, `nn.GRU` and `nn.RNN` with the weights of their gates as layers.

What the input gives is computed for all steps at once; only what the state gives has to wait for the step before. One
layer in one direction runs over all steps of time in whichever way is right and fast:

    somebody watches a layer, or it is no plain one ──▶ called step by step, by `OpenedRecurrent`
    torch.export records ─────────────────────────────▶ scanned: one node for all steps, of any number
    an exporter has its own form of it ───────────────▶ its `RECORDER`
    on a CPU, where there are many steps ─────────────▶ fused: PyTorch's own kernel, with W̃ of the state's weights
    all else ─────────────────────────────────────────▶ looped

All of them compute the same to rounding, and have the same gradients.

Shape suffixes: T steps, B samples (of a packed batch those that are not over), H the state, P what is put out (H, or
less where an LSTM has projections), I the input, G = gates · H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _get_current_dispatch_mode

from decomposable.core.standin import StandIn, product
from decomposable.core.unpacking.parts import Opened, PackedWeight, ViewLinear
from decomposable_edge.errors import InvalidArgumentError

State = tuple[Tensor, ...]
"""h, and of an LSTM c."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Recorder = Callable[[str, Tensor, State, "CellWeights", bool], tuple[Tensor, Tensor]]
"""From mode, input, first state, weights and whether time runs backwards to all outputs and the last c (else h)."""

RECORDER: ContextVar[Recorder | None] = ContextVar("RECORDER", default=None)
"""How `torch.export` is to record a recurrence; None for operators of PyTorch only, as a program needs that is loaded
where this package is not."""

_STEP = 1_000_000  # MACs in the time that a step of a loop in Python takes besides its products
_KERNELS = {"GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


@dataclass(frozen=True, kw_only=True, eq=False)
class CellWeights:
    """Hold the weights of one layer in one direction, each as the stages of a chain: one of them where it is dense."""

    ih: tuple[Tensor, ...]
    hh: tuple[Tensor, ...]
    hr: tuple[Tensor, ...]  # none without projections
    biases: tuple[Tensor, Tensor] | None  # of ih and of hh

    @classmethod
    def of(cls, ih: nn.Module, hh: nn.Module, hr: nn.Module | None) -> CellWeights | None:
        """Return those of layers that only multiply by them; None where one does more, or somebody watches it."""
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
        """Return all of them."""
        return (*self.ih, *self.hh, *self.hr, *(self.biases or ()))


def _stages(layer: nn.Module) -> tuple[Tensor, ...] | None:
    """Return the weights of a `Linear` or of a chain of them, if its forward is nothing else."""
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
    """Multiply the input by one stage after the other."""
    for stage in stages:
        x = F.linear(x, stage)
    return x


def from_input(x: Tensor, weights: CellWeights, mode: str) -> Tensor:
    """Return what the input gives to the gates, at all steps at once, with the biases that can be added there.

    The state's bias of a GRU is multiplied by a gate, and has to wait.
    """
    *before, last = weights.ih
    biases = weights.biases
    bias = None if biases is None else biases[0] if mode == "GRU" else biases[0] + biases[1]
    return F.linear(chained(x, before), last, bias)


def step_of(weights: CellWeights, mode: str) -> Callable[[Tensor, State], State]:
    """Return one step of time, from what `from_input` gives for it and the state before, to the state behind it."""
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
    """Return h and c, in the letters of PyTorch's documentation."""
    i, f, g, o = total_BG.chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(from_input_BG: Tensor, from_state_BG: Tensor, h: Tensor) -> State:
    """Return h, with the reset gate behind the product with the state."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (each.chunk(3, dim=-1) for each in (from_input_BG, from_state_BG))
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    z = (z_x + z_h).sigmoid()
    return (n + z * (h - n),)  # not lerp: under autocast the first state is of another type


def plain(total_BG: Tensor, mode: str) -> State:
    """Return h of a layer without gates."""
    return (total_BG.relu() if mode == "RNN_RELU" else total_BG.tanh(),)


def run(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    """Return all outputs, by time, and the last state."""
    if is_recorded():
        recorder = RECORDER.get()
        if recorder is None:
            return _scanned(mode, x_TBI, start, weights, backwards)
        y_TBP, last = recorder(mode, x_TBI, start, weights, backwards)
        return y_TBP, (y_TBP[0 if backwards else -1], last) if mode == "LSTM" else (last,)
    way = _fused if _can_be_fused(x_TBI, start, weights) else _looped
    return way(mode, x_TBI, start, weights, backwards)


def is_recorded() -> bool:
    """Return whether `torch.export` records what is computed."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _looped(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    step, state = step_of(weights, mode), start
    gates = from_input(x_TBI, weights, mode).unbind(0)
    outputs = []
    for gates_BG in reversed(gates) if backwards else gates:
        state = step(gates_BG, state)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _scanned(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    from torch._higher_order_ops.scan import scan  # it loads the compiler

    def step(state: State, gates_BG: Tensor) -> tuple[State, Tensor]:
        state = step_of(weights, mode)(gates_BG, state)
        return state, state[0].clone()  # what is put out may not be the state itself

    gates_TBG = from_input(x_TBI, weights, mode)
    first = tuple(each.clone() for each in start)  # nor may two inputs be parts of one tensor
    state, y_TBP = scan(step, first, gates_TBG, reverse=backwards)
    return y_TBP, tuple(state)


def _fused(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    """Run the kernel of `nn.LSTM` and its like; its weight of the input is the last stage of the chain."""
    x_TBZ = chained(x_TBI, weights.ih[:-1])
    x_TBZ = x_TBZ.flip(0) if backwards else x_TBZ
    hr = (product(weights.hr),) if weights.hr else ()
    tensors = [weights.ih[-1], product(weights.hh), *(weights.biases or ()), *hr]
    first = tuple(each.unsqueeze(0) for each in start)
    options = weights.biases is not None, 1, 0.0, False, False, False
    if mode == "LSTM":
        y_TBP, *last = torch._VF.lstm(x_TBZ, first, tensors, *options)
    else:
        y_TBP, *last = getattr(torch._VF, _KERNELS[mode])(x_TBZ, first[0], tensors, *options)
    return y_TBP.flip(0) if backwards else y_TBP, tuple(each.squeeze(0) for each in last)


def _can_be_fused(x_TBI: Tensor, start: State, weights: CellWeights) -> bool:
    """Return whether PyTorch's kernel can take it, hides nothing that a loop would show, and is faster."""
    if _is_watched():
        return False
    tensors = (x_TBI, *start, *weights.all)
    is_usual = all(type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu" for each in tensors)
    is_one_kind = {each.dtype for each in tensors} in ({torch.float32}, {torch.float64})
    if not is_usual or not is_one_kind or not x_TBI.numel():
        return False
    return sum(map(_product_macs, (weights.hh, weights.hr))) <= len(x_TBI) * _STEP


def _product_macs(stages: tuple[Tensor, ...]) -> int:
    return sum(before.shape[0] * before.shape[1] * stages[-1].shape[0] for before in stages[:-1])


def _is_watched() -> bool:
    """Return whether somebody records, transforms or counts what is computed, or computes it in another type."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
    )


class OpenedRecurrent(Opened):
    """Run layers ih_l0, hh_l0 (and hr_l0 of an LSTM with projections) for every layer and direction."""

    mode: str
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    dropout: float

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Return the reason to leave a module as it is, or None for the plain kinds."""
        if type(module) not in (nn.LSTM, nn.GRU, nn.RNN) or "forward" in vars(module):
            return f"{type(module).__name__} has a forward of its own"
        return None

    @classmethod
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """Return two or three weights for every layer and direction."""
        assert isinstance(module, nn.RNNBase)
        parts = {}
        for name in module._parameters:
            if name.startswith("weight_"):
                bias = name.replace("weight", "bias")
                bias_name = bias if bias in module._parameters else None
                parts[name.removeprefix("weight_")] = PackedWeight(owner=module, weight=name, bias=bias_name)
        return parts

    def flatten_parameters(self) -> None:
        """Do nothing: a model may ask for it."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute what the recurrent layers of PyTorch do."""
        if isinstance(input, PackedSequence):
            if is_recorded():
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
        """Return the first state of every layer and direction: those given, or zeros."""
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            count = self.num_layers * (2 if self.bidirectional else 1)
            return tuple(like.new_zeros(count, batch, w) for w in widths[: 2 if self.mode == "LSTM" else 1])
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        states = states if is_batched else tuple(each.unsqueeze(1) for each in states)
        return states if order is None else tuple(each.index_select(1, order) for each in states)

    def _run(self, x: Tensor, states: State, sizes: list[int] | None) -> tuple[Tensor, State]:
        """Run layer after layer; outputs are those of the last.

        Of a packed batch, all samples of all steps lie along the first axis; `sizes` are the samples at every step.
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
        """Run one layer in one direction."""
        ih, hh, hr = (self._modules.get(f"{kind}_{name}") for kind in ("ih", "hh", "hr"))
        assert ih is not None
        assert hh is not None
        weights = CellWeights.of(ih, hh, hr) if sizes is None else None
        if weights is not None:
            return run(self.mode, x, start, weights, backwards)
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
        """Run one step of time, in which the layers are called."""
        from_state_BG = hh(state[0])
        if self.mode == "GRU":
            return gru(from_input_BG, from_state_BG, state[0])
        total_BG = from_input_BG + from_state_BG
        if self.mode != "LSTM":
            return plain(total_BG, self.mode)
        h, c = lstm(total_BG, state[1])
        return (h if hr is None else hr(h)), c

    def _result(self, input: Any, outputs: Tensor, final: State, is_batched: bool) -> Any:
        """Return outputs and last states in the form that the input has."""
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
    """Return the state of those samples of a packed batch that have this step: the shortest are last.

    Those that end here go to `over`; those that begin here, where the loop runs backwards, have their first state.
    """
    before = len(state[0])
    if size < before:
        over.append(tuple(each[size:] for each in state))
        return tuple(each[:size] for each in state)
    if size > before:
        return tuple(torch.cat([each, new[before:size]]) for each, new in zip(state, start, strict=True))
    return state
