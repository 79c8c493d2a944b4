"""Gradients of the two networks of a joint step: mixed layer by layer, and added to `.grad`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from decomposable.core.layers import Layer
from decomposable.core.svd import most_precise
from decomposable.core.unpacking.parts import ParameterSlice
from decomposable_edge.errors import InvalidArgumentError

Gradient = Mapping[nn.Parameter, Tensor | None]
"""∂L/∂w of every trainable parameter; None where the loss does not depend on it."""

_KEPT = 0.9  # of a running norm, when the next one comes


@contextmanager
def requiring_grad(parameters: Iterable[nn.Parameter], wanted: bool) -> Iterator[None]:
    """Take gradients of these parameters inside, or none of them."""
    changed = [p for p in parameters if p.requires_grad != wanted]
    try:
        for parameter in changed:
            parameter.requires_grad_(wanted)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not wanted)


def by_parameter(layers: Sequence[Layer]) -> dict[nn.Parameter, list[Layer]]:
    """Return the decomposed weights that each parameter is, or holds."""
    found: dict[nn.Parameter, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.parameter, []).append(layer)
    return found


def mix(full: Tensor | None, low: Tensor | None, balance: float, layers: Sequence[Layer]) -> Tensor | None:
    """Return (1 − λ) ∇_f + λ ∇̂, where ∇̂ is ∇ scaled to the norm of ∇_f for a decomposed weight (end of appendix A).

    `layers` are the decomposed weights that the parameter is, or holds.
    """
    if low is None:
        return None if full is None else full * (1 - balance)
    if full is None:  # the full pass did not use it: for a decomposed weight its norm there is 0, so ∇̂ = 0
        return None if layers else low * balance
    hat = _rebalanced(low.to(full.dtype), balance, [(layer.cut, norm(layer.cut.of(full))) for layer in layers])
    return hat.add_(full, alpha=1 - balance)


def _rebalanced(value: Tensor, share: float, norms: Sequence[tuple[ParameterSlice, Tensor]]) -> Tensor:
    """Return share · ∇, with each decomposed weight in it scaled to a norm."""
    factors = [(cut, (share * _ratio(wanted, norm(cut.of(value)))).to(value.dtype)) for cut, wanted in norms]
    if len(factors) == 1 and factors[0][0].rows is None:  # the weight is the whole parameter
        return value * factors[0][1]
    result = value * share
    for cut, factor in factors:
        cut.of(result).copy_(cut.of(value) * factor)
    return result


def norm(gradient: Tensor) -> Tensor:
    """Return ‖·‖_F. On a CPU float32 is several times faster; float64 is needed where the squares would not fit."""
    if gradient.device.type == "cpu" and gradient.dtype == torch.float32:
        found = torch.linalg.vector_norm(gradient)
        if 1e-12 < found < 1e12:
            return found
    return torch.linalg.vector_norm(gradient, dtype=most_precise(gradient.device))


def _ratio(full_norm: Tensor, low_norm: Tensor) -> Tensor:
    """Return ‖∇_f‖/‖∇‖, and 0 where there is no ∇. NaN and infinity stay visible to a GradScaler: 0 · NaN is NaN."""
    return torch.where(low_norm > 0, full_norm / low_norm, 0.0)


class RunningNorms:
    """Keep ‖∇_f‖ of every decomposed weight, averaged over the full-rank steps so far.

    Where full- and low-rank steps take turns, a low-rank step has no ∇_f to be scaled to; this stands in for it. Norms
    are those of the loss itself, because a `GradScaler` changes its scale, and a call its weight; of a step that a
    scaler will skip none is taken.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = by_parameter(layers)
        self._norms: dict[str, Tensor] = {}

    def update(self, gradient: Gradient, scale: Tensor | float) -> None:
        """Take in the gradient of a full-rank step, which is that of `scale` times the loss."""
        for parameter, value in gradient.items():
            if value is None:
                continue
            for layer in self._layers.get(parameter, ()):
                found = norm(layer.cut.of(value)).to(most_precise(value.device)) / scale
                before = self._norms.get(layer.name, found).to(found)
                mean = torch.where(before.isfinite(), torch.lerp(found, before, _KEPT), found)
                self._norms[layer.name] = torch.where(found.isfinite(), mean, before)

    def rebalanced(self, gradient: Gradient, share: float, scale: Tensor | float) -> dict[nn.Parameter, Tensor | None]:
        """Return share · ∇̂, with ∇̂ scaled to the running norm for every decomposed weight."""
        result: dict[nn.Parameter, Tensor | None] = dict.fromkeys(gradient)
        for parameter, value in gradient.items():
            layers = self._layers.get(parameter, ())
            # A weight that no full pass has used has the norm 0 there; so has one whose norms all overflowed.
            if value is not None and all(layer.name in self._norms for layer in layers):
                known = [self._norms[layer.name].to(value.device).nan_to_num(0.0, 0.0) * scale for layer in layers]
                cuts = [layer.cut for layer in layers]
                result[parameter] = _rebalanced(value, share, list(zip(cuts, known, strict=True)))
        return result

    def state_dict(self) -> dict[str, float]:
        """Return the norms by layer, those that are known."""
        return {name: value for name, each in self._norms.items() if math.isfinite(value := float(each))}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take the norms of a `state_dict` of this model; refuse another."""
        known = {layer.name for layers in self._layers.values() for layer in layers}
        for name, value in state.items():
            if name not in known or not isinstance(value, float) or not value >= 0:
                came = f"norm {value!r:.40} of '{name:.80}'"
                raise InvalidArgumentError.about("state", came, "a state of this model")
        self._norms = {name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()}


def scaled(gradient: Gradient, share: float) -> dict[nn.Parameter, Tensor | None]:
    """Return share · ∇, as new tensors: autograd may return one tensor for two parameters, or an expanded one."""
    return {p: None if g is None else g * share if share != 1 else g.clone() for p, g in gradient.items()}


@torch.no_grad()
def accumulate(gradient: Gradient) -> None:
    """Add to `.grad`, as `backward()` does."""
    for parameter, value in gradient.items():
        if value is None:
            continue
        if parameter.grad is None:
            parameter.grad = value.to(parameter.dtype)
        else:
            parameter.grad = parameter.grad.add_(value.to(parameter.grad.dtype))


def refuse_reentrant(loss: Tensor) -> None:
    """Refuse reentrant checkpoints: they call backward() inside, which autograd.grad leaves out."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CheckpointFunction"):
            why = "the model uses torch.utils.checkpoint with use_reentrant=True"
            raise InvalidArgumentError.about("closure", True, "use_reentrant=False", why=why)
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
