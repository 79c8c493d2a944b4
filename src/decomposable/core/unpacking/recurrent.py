"""`nn.LSTM`, `nn.GRU` and `nn.RNN` with the weights of their gates as layers.

What the input gives is computed for all steps at once; only what the state gives has to wait. One layer in one
direction runs over all steps of time in whichever way is right and fast. All have the same result and gradients:

    torch.export records ────────────────────────▶ scanned: one node for all steps, of any number
    an exporter has its own form of it ──────────▶ its `RECORDER`
    on a CPU, where there are many steps ────────▶ fused: PyTorch's own kernel, with W̃ of the state's weights
    all else ────────────────────────────────────▶ looped; its layers are called where somebody watches them

Shape suffixes: T steps, B samples (of a packed batch those that are not over), H the state, P what is put out (H, or
less where an LSTM has projections), I the input, G = gates · H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
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
        """Return the weights of layers that only multiply by them; None if a layer does more, or is watched."""
        stages = [() if layer is None else _stages(layer) for layer in (ih, hh, hr)]
        if any(each is None for each in stages) or modules._has_any_global_hook():
            return None
        biases = ih.bias, hh.bias
        is_pair = all(isinstance(each, Tensor) for each in biases)
        if not is_pair and any(each is not None for each in biases):
            return None
        return cls(ih=stages[0], hh=stages[1], hr=stages[2], biases=biases if is_pair else None)  # type: ignore[arg-type]


def _stages(layer: nn.Module) -> tuple[Tensor, ...] | None:
    """Return the weights of a `Linear` or of a chain of them, if its forward is nothing else."""
    is_chain = type(layer) is StandIn
    parts: list[Any] = list(layer._modules.values()) if is_chain else [layer]
    is_kind = all(type(part) in (nn.Linear, ViewLinear) for part in parts)
    if not is_kind or any(map(_is_watched, [layer, *parts])) or any(part.bias is not None for part in parts[:-1]):
        return None
    return tuple(part.weight for part in parts)


def _is_watched(module: nn.Module) -> bool:
    return "forward" in vars(module) or any(getattr(module, name) for name in _HOOKS)


def chained(x: Tensor, stages: Sequence[Tensor]) -> Tensor:
    """Multiply the input by one stage after the other."""
    for stage in stages:
        x = F.linear(x, stage)
    return x


def _from_input(x: Tensor, weights: CellWeights, mode: str) -> Tensor:
    """Return what the input gives to the gates, at all steps at once, with the biases that can be added there.

    The state's bias of a GRU is multiplied by a gate, and has to wait.
    """
    biases = weights.biases
    bias = None if biases is None else biases[0] if mode == "GRU" else biases[0] + biases[1]
    return F.linear(chained(x, weights.ih[:-1]), weights.ih[-1], bias)


Step = Callable[[Tensor, State], State]
"""From what the input gives to the gates, and the state before, to the state behind."""


def _step_of(weights: CellWeights, mode: str) -> Step:
    *before, last = weights.hh
    bias = None if weights.biases is None else weights.biases[1]
    hr, transposed = partial(chained, stages=weights.hr) if weights.hr else None, last.t()

    def step(gates_BG: Tensor, state: State) -> State:
        h = chained(state[0], before)
        if mode == "GRU":
            return _gru(gates_BG, F.linear(h, last, bias), state[0])
        return _next(mode, torch.addmm(gates_BG, h, transposed), state, hr)

    return step


def _calling_step(hh: nn.Module, hr: nn.Module | None, mode: str) -> Step:
    def step(gates_BG: Tensor, state: State) -> State:
        if mode == "GRU":
            return _gru(gates_BG, hh(state[0]), state[0])
        return _next(mode, gates_BG + hh(state[0]), state, hr)

    return step


def _gru(from_input_BG: Tensor, from_state_BG: Tensor, h: Tensor) -> State:
    """Return h, with the reset gate behind the product with the state."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = (each.chunk(3, dim=-1) for each in (from_input_BG, from_state_BG))
    n = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    z = (z_x + z_h).sigmoid()
    return (n + z * (h - n),)  # not lerp: under autocast the first state is of another type


def _next(mode: str, total_BG: Tensor, state: State, hr: Callable[[Tensor], Tensor] | None) -> State:
    """Return h and c of an LSTM, in the letters of PyTorch's documentation, or h of a layer without gates."""
    if mode != "LSTM":
        return (total_BG.relu() if mode == "RNN_RELU" else total_BG.tanh(),)
    i, f, g, o = total_BG.chunk(4, dim=-1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if hr is None else hr(h)), c


def _is_recorded() -> bool:
    """Return whether `torch.export` records what is computed."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _recorded(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    recorder = RECORDER.get()
    if recorder is not None:
        y_TBP, last = recorder(mode, x_TBI, start, weights, backwards)
        return y_TBP, (y_TBP[0 if backwards else -1], last) if mode == "LSTM" else (last,)
    from torch._higher_order_ops.scan import scan  # it loads the compiler

    def step(state: State, gates_BG: Tensor) -> tuple[State, Tensor]:
        state = _step_of(weights, mode)(gates_BG, state)
        return state, state[0].clone()  # what is put out may not be the state itself

    first = tuple(each.clone() for each in start)  # nor may two inputs be parts of one tensor
    state, y_TBP = scan(step, first, _from_input(x_TBI, weights, mode), reverse=backwards)
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
    is_followed = (  # somebody records, transforms or counts what is computed, or computes it in another type
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
    )
    tensors = (x_TBI, *start, *weights.ih, *weights.hh, *weights.hr, *(weights.biases or ()))
    is_usual = all(type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu" for each in tensors)
    is_one_kind = {each.dtype for each in tensors} in ({torch.float32}, {torch.float64})
    if is_followed or not is_usual or not is_one_kind or not x_TBI.numel():
        return False
    to_multiply = sum(each.numel() * chain[-1].shape[0] for chain in (weights.hh, weights.hr) for each in chain[:-1])
    return to_multiply <= len(x_TBI) * _STEP


def _looped(step: Step, gates: Tensor, start: State, sizes: list[int] | None, backwards: bool) -> tuple[Tensor, State]:
    """Run one step after the other; of a packed batch, whose shortest samples are last, `sizes` are those of each."""
    state = start if sizes is None else tuple(each[: sizes[-1 if backwards else 0]] for each in start)
    over: list[State] = []  # of samples that have ended
    outputs = []
    each_step = gates.unbind(0) if sizes is None else gates.split(sizes)
    for gates_BG in reversed(each_step) if backwards else each_step:
        if sizes is not None:
            before, size = len(state[0]), len(gates_BG)
            if size < before:
                over.append(tuple(each[size:] for each in state))
                state = tuple(each[:size] for each in state)
            elif size > before:  # samples that begin here, where time runs backwards
                state = tuple(torch.cat([each, new[before:size]]) for each, new in zip(state, start, strict=True))
        state = step(gates_BG, state)
        outputs.append(state[0])
    for ended in reversed(over):
        state = tuple(torch.cat(pair) for pair in zip(state, ended, strict=True))
    joined = torch.stack if sizes is None else torch.cat
    return joined(outputs[::-1] if backwards else outputs), state


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
    def parts(cls, module: nn.Module) -> dict[str, PackedWeight]:
        """Return two or three weights for every layer and direction."""
        names = [name.removeprefix("weight_") for name in module._parameters if name.startswith("weight_")]
        biases = {name: f"bias_{name}" if f"bias_{name}" in module._parameters else None for name in names}
        return {name: PackedWeight(owner=module, weight=f"weight_{name}", bias=biases[name]) for name in names}

    def flatten_parameters(self) -> None:
        """Do nothing: a model may ask for it."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Compute what the recurrent layers of PyTorch do."""
        sizes: list[int] | None = None
        if isinstance(input, PackedSequence):
            if _is_recorded():
                raise InvalidArgumentError(
                    f"{self.mode}: got a PackedSequence, whose steps are as wide as its values say; allowed in an "
                    "export: a tensor, padded to one length"
                )
            sizes, order, unorder = input.batch_sizes.tolist(), input.sorted_indices, input.unsorted_indices
            final, outputs = self._run(input.data, self._states(hx, input.data, sizes[0], order), sizes)
            made: Any = PackedSequence(outputs, input.batch_sizes, order, unorder)
            final = final if unorder is None else tuple(each.index_select(1, unorder) for each in final)
        elif input.dim() == 3:
            x = input.transpose(0, 1) if self.batch_first else input
            final, outputs = self._run(x, self._states(hx, x, x.shape[1]), None)
            made = outputs.transpose(0, 1) if self.batch_first else outputs
        else:  # one sample
            x, given = input.unsqueeze(1), hx if self.mode == "LSTM" else (hx,)
            states = self._states(None, x, 1) if hx is None else tuple(each.unsqueeze(1) for each in given)
            final, outputs = self._run(x, states, None)
            made, final = outputs.squeeze(1), tuple(each.squeeze(1) for each in final)
        return made, final if self.mode == "LSTM" else final[0]

    def _states(self, hx: Any, like: Tensor, batch: int, order: Tensor | None = None) -> State:
        """Return the first state of every layer and direction: those given, or zeros."""
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            count = self.num_layers * (2 if self.bidirectional else 1)
            return tuple(like.new_zeros(count, batch, w) for w in widths[: 2 if self.mode == "LSTM" else 1])
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        return states if order is None else tuple(each.index_select(1, order) for each in states)

    def _run(self, x: Tensor, states: State, sizes: list[int] | None) -> tuple[State, Tensor]:
        """Run layer after layer; return their last states, and the outputs of the last one.

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
        return tuple(torch.stack(each) for each in zip(*finals, strict=True)), x

    def _direction(
        self, x: Tensor, start: State, name: str, sizes: list[int] | None, *, backwards: bool
    ) -> tuple[Tensor, State]:
        """Run one layer in one direction."""
        ih, hh, hr = (self._modules.get(f"{kind}_{name}") for kind in ("ih", "hh", "hr"))
        assert ih is not None
        assert hh is not None
        weights = CellWeights.of(ih, hh, hr)
        if weights is None:
            return _looped(_calling_step(hh, hr, self.mode), ih(x), start, sizes, backwards)
        if sizes is None and _is_recorded():
            return _recorded(self.mode, x, start, weights, backwards)
        if sizes is None and _can_be_fused(x, start, weights):
            return _fused(self.mode, x, start, weights, backwards)
        return _looped(_step_of(weights, self.mode), _from_input(x, weights, self.mode), start, sizes, backwards)
