"""Finding out how a network is called: the pass that counts the MACs is watched.

The tensors of the batch are known by identity. What the network was called with is then either one of them, or was
computed on the way, which no exported file could do again.
"""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.tracing import Entry, Forward, call_with_first, first_entry, map_entries
from decomposable.network.calls import INPUT, CallSignature, InputSpec, Slot

_KEPT_ROWS, _KEPT_BYTES = 8, 1 << 26


class Unclear(ValueError):
    """It cannot be said what a network takes; the text says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """How a network was called, and with which rows of each input; or, in `unclear`, why that cannot be said."""

    call: CallSignature | None = None
    rows: Mapping[str, Tensor] | None = None
    unclear: str | None = None

    def kept(self) -> Mapping[str, Tensor] | None:
        """Return a few of the rows, to be remembered: they try out what is exported later."""
        if self.rows is None:
            return None
        size = sum(t.element_size() * t[:1].numel() for t in self.rows.values())
        count = max(1, min(_KEPT_ROWS, _KEPT_BYTES // max(1, size)))
        return {name: tensor[:count].clone() for name, tensor in self.rows.items()}


class _Stop(BaseException):
    """Ends a pass where the network is called. No `Exception`: code of somebody else must not catch it."""


class Watch:
    """A ``forward(net, batch)`` that calls another one and sees how that calls the network."""

    def __init__(self, forward: Forward) -> None:
        self._is_default = forward is call_with_first
        self._forward = partial(call_with_first, name="example_input") if self._is_default else forward
        self._batch: Any = None
        self._calls: list[CallSignature | Unclear] = []

    def __call__(self, net: nn.Module, batch: Any) -> Any:
        """Call the other one."""
        self._batch, self._calls = batch, []
        return self._run(net, batch, self._calls)

    def captured(self, net: nn.Module) -> Captured:
        """Return how the network was called, which has run once by now."""
        if self._is_default:
            return first_captured(net, self._batch)
        try:
            call = self._only_call(net)
        except Unclear as error:
            return Captured(unclear=str(error))
        rows = {name: tensor.detach().cpu() for name, tensor in call.picked(self._batch).items()}
        return Captured(call=call, rows=rows if all(map(len, rows.values())) else None)

    def _run(self, net: nn.Module, batch: Any, calls: list[CallSignature | Unclear], *, stop: bool = False) -> Any:
        reader = _Reader()

        def see(module: nn.Module, args: Any, kwargs: Any) -> None:
            try:
                calls.append(reader.call(net, args, kwargs))
            except Unclear as error:
                calls.append(error)
            if stop:
                raise _Stop

        hook = net.register_forward_pre_hook(see, with_kwargs=True, prepend=True)
        try:
            return self._forward(net, map_entries(reader.noted, batch))
        finally:
            hook.remove()

    def _only_call(self, net: nn.Module) -> CallSignature:
        if len(self._calls) != 1:
            what = f"calls the network {len(self._calls)} times" if self._calls else "does not call the network itself"
            raise Unclear(f"forward= {what}")
        [call] = self._calls
        if isinstance(call, Unclear):
            raise call
        if any(not isinstance(value, Slot | None) for value in (*call.args, *call.kwargs.values())):
            self._check_constants(net, call)
        return call

    def _check_constants(self, net: nn.Module, call: CallSignature) -> None:
        """Refuse what is not an input and not the same for other batches: one sample, and more of them, of zeros."""
        for times in (0, 2):
            others: list[CallSignature | Unclear] = []
            with suppress(_Stop, Exception):  # code of somebody else
                self._run(net, map_entries(partial(_zeros, times), self._batch), others, stop=True)
            other = others[0] if others else None
            if not isinstance(other, CallSignature) or (other.args, other.kwargs) != (call.args, call.kwargs):
                raise Unclear("forward= computes a number or a text from the batch, which the network is called with")


def _zeros(times: int, value: Any, _: Entry) -> Any:
    """Return an entry of a batch as zeros for so many times as many samples, or for one."""
    if not isinstance(value, Tensor):
        return value
    zeros = torch.zeros_like(value)
    return zeros if not value.dim() else torch.cat([zeros] * times) if times else zeros[:1]


class _Reader:
    """Reads the arguments of a call, and collects the inputs among them, which are tensors of the batch.

    A second call in the same pass is unclear anyway, so what one collects need not be told from the other's.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Entry]] = {}  # held, so that no two of them can share an address
        self._others: list[Any] = []
        self._inputs: dict[str, Tensor] = {}
        self._places: dict[str, Entry] = {}

    def noted(self, value: Any, entry: Entry) -> Any:
        """Note an entry of the batch, and return it; tensors as new objects: one that is there twice is two entries."""
        if isinstance(value, Tensor):
            value = value.detach()
            self._tensors[id(value)] = value, entry
        elif value is not None:
            self._others.append(value)
        return value

    def call(self, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallSignature:
        """Return the call with these; every input has to have one row for each sample."""
        made = tuple(map(self._read, args, _positional_names(net, len(args))))
        by_name = {name: self._read(value, name) for name, value in kwargs.items()}
        if not self._inputs:
            raise Unclear("forward= calls the network without a tensor of the batch")
        first, rows = next(iter(self._inputs.items()))
        for name, tensor in self._inputs.items():
            if not tensor.dim():
                raise Unclear(f"the input '{name}' is a single number, which has no batch")
            if len(tensor) != len(rows):
                raise Unclear(f"the input '{name}' has {len(tensor)} rows where '{first}' has {len(rows)}")
        specs = {name: InputSpec.of_tensor(tensor) for name, tensor in self._inputs.items()}
        return CallSignature(inputs=specs, entries=self._places, args=made, kwargs=by_name)

    def _read(self, value: Any, where: str) -> Any:
        """Return the argument with a `Slot` for every input in it; `where` is what the network's code calls it."""
        if isinstance(value, Tensor):
            return self._slot(value, where)
        if value is None:
            return None
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
            if any(type(other) is type(value) and other == value for other in self._others):
                raise Unclear(f"the batch's entry for '{where}' is {value!r:.40}, which is no tensor")
            return value
        if type(value) in (list, tuple):
            return type(value)(self._read(part, f"{where}_{i}") for i, part in enumerate(value))
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {key: self._read(part, key) for key, part in value.items()}
        raise Unclear(f"forward= calls the network with a {type(value).__name__} as '{where}'")

    def _slot(self, tensor: Tensor, where: str) -> Slot:
        _, entry = self._tensors.get(id(tensor), (None, None))
        if entry is None:
            raise Unclear(f"forward= computes '{where}', which is not an entry of the batch itself")
        if any(type(key) not in (str, int) for key in entry):
            raise Unclear(f"the batch's entry for '{where}' has a key that is neither text nor a whole number")
        name = str(entry[-1]) if entry and _is_name(entry[-1]) else where
        if not _is_name(name):
            raise Unclear(f"an input of the network would be called {name!r:.40}, which is no name in Python")
        if self._places.setdefault(name, entry) != entry:
            raise Unclear(f"two inputs of the network would be called '{name}'")
        self._inputs[name] = tensor
        return Slot(name)


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and not keyword.iskeyword(key)


def _positional_names(net: nn.Module, count: int) -> list[str]:
    """Return what the network's code calls its first arguments."""
    names: list[str] = []
    for parameter in _parameters(net):
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"input_{i}" for i in range(len(names), count)])[:count]


def _parameters(net: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(net.forward).parameters.values())
    except (TypeError, ValueError):  # code that is not Python
        return []


def first_captured(net: nn.Module, batch: Any) -> Captured:
    """Return the call with the first entry of a batch; nothing need run. Others that look like inputs are unclear."""
    spec = InputSpec.of(batch)
    if spec is None:
        return Captured()
    taken = {parameter.name for parameter in _parameters(net)}
    others = [key for key in list(batch)[1:] if key in taken] if isinstance(batch, Mapping) else []
    what = f"only the first entry of the batch goes into the network, whose forward takes {', '.join(others)}, too"
    first = first_entry(batch).detach().cpu()
    return Captured(
        call=CallSignature.with_first(spec),
        rows={INPUT: first} if len(first) else None,
        unclear=what if others else None,
    )
