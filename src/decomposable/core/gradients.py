"""Gradients of the two networks of a joint step: mixed layer by layer, and added to `.grad`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from decomposable.core.layers import Layer
from decomposable.core.svd import most_precise
from decomposable.core.unpacking.parts import ParameterSlice
from decomposable_edge.errors import InvalidArgumentError

Gradient = Mapping[nn.Parameter, Tensor | None]
"""∂L/∂w of every trainable parameter; None where the loss does not depend on it."""

_KEPT = 0.9  # of a running norm, when the next one comes


def mix(full: Tensor | None, low: Tensor | None, balance: float, cuts: Sequence[ParameterSlice]) -> Tensor | None:
    """Return (1 − λ) ∇_f + λ ∇̂, where ∇̂ is ∇ scaled to the norm of ∇_f for a decomposed weight (end of appendix A).

    `cuts` are the decomposed weights that the parameter is, or holds.
    """
    if full is None or low is None:
        only, share = (full, 1 - balance) if low is None else (low, balance)
        # A decomposed weight that the full pass did not use has norm 0 there, so ∇̂ = 0.
        return None if only is None or (cuts and full is None) else only * share
    low = low.to(full.dtype)
    if len(cuts) == 1 and cuts[0].rows is None:
        return _rebalanced_mix(full, low, balance)
    mixed = full * (1 - balance) + low * balance
    for cut in cuts:
        cut.of(mixed).copy_(_rebalanced_mix(cut.of(full), cut.of(low), balance))
    return mixed


def _rebalanced_mix(full: Tensor, low: Tensor, balance: float) -> Tensor:
    low_share = balance * _ratio(norm(full), norm(low))
    return (full * (1 - balance)).addcmul_(low, low_share.to(full.dtype))


def cuts_of(layers: Sequence[Layer]) -> dict[nn.Parameter, list[ParameterSlice]]:
    """Return the decomposed weights that each parameter is, or holds."""
    cuts: dict[nn.Parameter, list[ParameterSlice]] = {}
    for layer in layers:
        cuts.setdefault(layer.parameter, []).append(layer.cut)
    return cuts


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
        self._layers = tuple(layers)
        self._norms: dict[str, Tensor] = {}

    def update(self, gradient: Gradient, scale: Tensor | float) -> None:
        """Take in the gradient of a full-rank step, which is that of `scale` times the loss."""
        for layer in self._layers:
            value, name = gradient.get(layer.parameter), layer.name
            if value is None:
                continue
            found = norm(layer.cut.of(value)).to(most_precise(value.device)) / scale
            before = self._norms[name].to(found) if name in self._norms else torch.full_like(found, math.nan)
            mean = torch.where(before.isfinite(), torch.lerp(found, before, _KEPT), found)  # the first stands alone
            self._norms[name] = torch.where(found.isfinite(), mean, before)

    def rebalanced(self, gradient: Gradient, share: float, scale: Tensor | float) -> dict[nn.Parameter, Tensor | None]:
        """Return share · ∇̂, with ∇̂ scaled to the running norm for every decomposed weight."""
        layers: dict[nn.Parameter, list[Layer]] = {}
        for layer in self._layers:
            layers.setdefault(layer.parameter, []).append(layer)
        result: dict[nn.Parameter, Tensor | None] = {}
        for parameter, value in gradient.items():
            own = layers.get(parameter, ())
            if value is None or any(layer.name not in self._norms for layer in own):
                result[parameter] = None  # no full pass has used this weight: its norm there is 0
                continue
            if len(own) == 1 and own[0].cut.rows is None:
                result[parameter] = self._to_norm(own[0].name, value, share, scale)
                continue
            result[parameter] = made = value * share
            for layer in own:
                layer.cut.of(made).copy_(self._to_norm(layer.name, layer.cut.of(value), share, scale))
        return result

    def _to_norm(self, name: str, value: Tensor, share: float, scale: Tensor | float) -> Tensor:
        found = norm(value).to(most_precise(value.device))
        # NaN is a norm that no full pass has had yet: all of them overflowed.
        wanted = self._norms[name].to(found).nan_to_num(0.0) * scale
        return value * (share * _ratio(wanted, found)).to(value.dtype)

    def state_dict(self) -> dict[str, float]:
        """Return the norms by layer, those that are known."""
        norms = {name: float(value) for name, value in self._norms.items()}
        return {name: value for name, value in norms.items() if math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take the norms of a `state_dict` of this model; refuse another."""
        known = {layer.name for layer in self._layers}
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
            raise InvalidArgumentError(
                "closure: the model uses torch.utils.checkpoint with use_reentrant=True; allowed: use_reentrant=False"
            )
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
