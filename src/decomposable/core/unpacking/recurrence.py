"""One recurrent layer in one direction, over all steps of time, in whichever way is right and fast.

    somebody watches a layer, or it is no plain one ──▶ called step by step, in `recurrent.py`
    torch.export records ─────────────────────────────▶ scanned: one node for all steps, of any number
    an exporter has its own form of it ───────────────▶ its `RECORDER`
    on a CPU, where there are many steps ─────────────▶ fused: PyTorch's own kernel, with W̃ of the state's weights
    all else ─────────────────────────────────────────▶ looped

All of them compute the same to rounding, and have the same gradients. Shape suffixes as in `cells.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from decomposable.core.standin import product
from decomposable.core.unpacking.cells import CellWeights, State, chained, from_input, step_of

Recorder = Callable[[str, Tensor, State, CellWeights, bool], tuple[Tensor, Tensor]]
"""From mode, input, first state, weights and whether time runs backwards to all outputs and the last c (else h)."""

RECORDER: ContextVar[Recorder | None] = ContextVar("RECORDER", default=None)
"""How `torch.export` is to record a recurrence; None for operators of PyTorch only, as a program needs that is loaded
where this package is not."""

_STEP = 1_000_000  # MACs in the time that a step of a loop in Python takes besides its products
_KERNELS = {"GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


def run(mode: str, x_TBI: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, State]:
    """All outputs, by time, and the last state."""
    if is_recorded():
        recorder = RECORDER.get()
        if recorder is None:
            return _scanned(mode, x_TBI, start, weights, backwards)
        y_TBP, last = recorder(mode, x_TBI, start, weights, backwards)
        return y_TBP, (y_TBP[0 if backwards else -1], last) if mode == "LSTM" else (last,)
    way = _fused if _can_be_fused(x_TBI, start, weights) else _looped
    return way(mode, x_TBI, start, weights, backwards)


def is_recorded() -> bool:
    """Whether `torch.export` records what is computed."""
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
    """By the kernel of `nn.LSTM` and its like, whose weight of the input is the last stage of what stands for it."""
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
    """Whether PyTorch's kernel can take it, sees all that would be seen of a loop, and is faster."""
    if _is_watched():
        return False
    tensors = (x_TBI, *start, *weights.all)
    is_usual = all(type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu" for each in tensors)
    is_one_kind = {each.dtype for each in tensors} in ({torch.float32}, {torch.float64})
    if not is_usual or not is_one_kind or not x_TBI.numel():
        return False
    return sum(map(_product_macs, (weights.hh, weights.hr))) <= len(x_TBI) * _STEP


def _product_macs(stages: tuple[Tensor, ...]) -> int:
    """The MACs of W̃."""
    return sum(before.shape[0] * before.shape[1] * stages[-1].shape[0] for before in stages[:-1])


def _is_watched() -> bool:
    """Whether somebody records, transforms or counts what is computed, or computes it in another type."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
    )
