"""One training step of the joint full- and low-rank objective: Algorithm 1 of the paper.

                 ┌─ full-rank network, W ────────────────→ loss ─→ ∇_f ───────────────────────────┐
    one batch ───┤                                                                                ├─→ .grad
                 └─ low-rank network, W̃ = truncate(W) ───→ loss ─→ ∇ (back through the SVD) ─→ ∇̂ ┘

    .grad += (1 − λ) ∇_f + λ ∇̂      with ∇̂ = ∇ · ‖∇_f‖/‖∇‖ for each decomposed weight, ∇̂ = ∇ for all else

Both networks share every parameter; only the low-rank one sees its weight matrices truncated, to ranks that a random
ratio Z of all the bases of the network allows. Nothing else is stored, and the model itself is never touched.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.checks import check_count, check_ratio, is_integer, is_number
from decomposable.core.bases import KeptBases
from decomposable.core.criteria import Criterion, find_criterion, score
from decomposable.core.forms import check_form, to_matrix
from decomposable.core.layers import FilterFn, TwoFactors, avoid_fast_paths_, find_layers, parameter_of, require_layers
from decomposable.core.lowrank import Layout, LowRankLayer
from decomposable.core.svd import SVD, truncate
from decomposable.core.tree import clone_buffers_, rewire, unwrap
from decomposable.errors import InvalidArgumentError
from decomposable.sizing.ranks import Limits, prefix_ranks, rank_limits

Closure = Callable[[nn.Module], Tensor]


class Losses(NamedTuple):
    """What one step saw: the two losses (detached) and the rank ratio Z that was drawn.

    With balance=0 there is no low-rank pass, and `low` is NaN. Where an SVD failed the step is a full-rank one: `low`
    is `full` and `ratio` is 1.
    """

    full: Tensor
    low: Tensor
    ratio: float


class JointObjective:
    """The joint objective around a model that stays as it is (equation 1 and Algorithm 1).

    Args:
        model: any module; compiled ones too. Its parameters keep their names, any optimiser can step them.
        form: how convolution weights become matrices, "spatial" or "channel".
        ratio: (α_l, α_u), between which Z is drawn anew in every step; one number keeps Z fixed.
        balance: λ, the weight of the low-rank loss; 0 is plain training and skips the low-rank pass.
        criterion: "singular_value", "energy", "uniform", or a function from singular values to scores.
        min_rank: the smallest rank of any layer (the authors' code uses 5).
        limits: smallest and largest rank by name pattern, such as ``{"layer4.*": (8, None)}``.
        refresh: decompose every this many steps; in between, W is projected onto the bases kept. 1 is the paper's.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; `skipped` names the others with a reason.
        seed: of the generator of Z; by default torch's initial seed.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> joint = JointObjective(model, ratio=(0.1, 0.5))
        >>> x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> losses = joint.backward(lambda net: nn.functional.cross_entropy(net(x), y))
        >>> model[0].weight.grad.shape, 0.1 <= losses.ratio <= 0.5
        (torch.Size([16, 8]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: str = "spatial",
        ratio: tuple[float, float] | float = (0.01, 0.5),
        balance: float = 0.5,
        criterion: str | Criterion = "singular_value",
        min_rank: int = 1,
        limits: Limits | None = None,
        refresh: int = 1,
        filter_fn: FilterFn | None = None,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.ratio = _check_range(ratio)
        self.balance = _check_balance(balance)
        self.refresh = check_count("refresh", refresh)
        self.criterion = find_criterion(criterion)
        layers, self.skipped = find_layers(unwrap(model), check_form(form), filter_fn)
        require_layers(layers, self.skipped)
        self.layers = layers
        full_ranks = [layer.full_rank for layer in layers]
        self._lower, self._upper = rank_limits([layer.name for layer in layers], full_ranks, min_rank, limits)
        self._pairs = {module: TwoFactors(module, layer.form) for layer in layers for module in layer.modules}
        self._bases = KeptBases(layers, self.refresh)
        if seed is not None and not is_integer(seed):
            raise InvalidArgumentError(f"seed={seed!r}; allowed: an int")
        self._generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else int(seed))
        self._layout = Layout(layers)
        self._has_warned = self._has_checked = False

    def backward(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Losses:
        """Compute both losses of one batch and add the joint gradient to every parameter's `.grad`.

        `closure(net)` returns the loss of the network it is given; it is called with the model and with its low-rank
        network, so everything else in it (the batch, the labels) is the same for both. A `GradScaler` may be passed
        here, or applied in the closure; step and update it as usual.
        """
        ratio = self._draw_ratio()
        full_loss, full_gradient = self._differentiate(closure, self.model, scaler)
        if self.balance == 0:
            _accumulate(_own(full_gradient))
            return Losses(full_loss, torch.full_like(full_loss, math.nan), ratio)

        try:
            decompositions = self._bases.of_current_weights()
        except torch.linalg.LinAlgError as error:
            warnings.warn(f"the SVD failed, this step is an ordinary full-rank step: {error}", stacklevel=2)
            _accumulate(_own(full_gradient))
            return Losses(full_loss, full_loss, 1.0)

        ranks = self.select_ranks(decompositions, ratio)
        low_loss, low_gradient = self._low_rank_pass(closure, scaler, decompositions, ranks, full_gradient)

        kernels = {layer.weight for layer in self.layers}
        _accumulate(
            {
                parameter: _mix(full_gradient[parameter], low_gradient[parameter], self.balance, parameter in kernels)
                for parameter in full_gradient
            }
        )
        return Losses(full_loss, low_loss, ratio)

    def select_ranks(self, decompositions: Mapping[str, SVD], ratio: float) -> dict[str, int]:
        """r_ℓ for every layer after dropping d = (1 − Z) ΣR_ℓ bases across the whole network."""
        names = [layer.name for layer in self.layers]
        sigmas = torch.cat([decompositions[name].s.double() for name in names]).cpu().numpy()
        sections = np.split(sigmas, np.cumsum([layer.full_rank for layer in self.layers])[:-1])
        # A layer's bases go in the order of their singular values; a criterion may rank them otherwise.
        scores = [np.sort(score(self.criterion, n, s))[::-1] for n, s in zip(names, sections, strict=True)]
        return dict(zip(names, prefix_ranks(scores, ratio, self._lower, self._upper).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to repeat exactly: the generator of Z and, where they are kept, the bases."""
        return {"generator": self._generator.get_state(), "bases": self._bases.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of an objective with the same settings around the same model."""
        for key in ("generator", "bases"):
            if key not in state:
                raise InvalidArgumentError(f"state: it has no entry {key!r}; allowed: what state_dict() returned")
        self._bases.load_state_dict(state["bases"])
        self._generator.set_state(state["generator"].cpu())

    def _draw_ratio(self) -> float:
        low, high = self.ratio
        return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def _low_rank_pass(
        self,
        closure: Closure,
        scaler: torch.amp.GradScaler | None,
        decompositions: Mapping[str, SVD],
        ranks: Mapping[str, int],
        full_gradient: Mapping[nn.Parameter, Tensor | None],
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor | None]]:
        """The low-rank network's loss and gradient."""
        network, layers = self._build_low_rank_network(decompositions, ranks)
        with self._layout.used_by(network):
            result = self._differentiate(closure, network, scaler)
        self._check_used(layers, full_gradient)
        return result

    def _build_low_rank_network(
        self, decompositions: Mapping[str, SVD], ranks: Mapping[str, int]
    ) -> tuple[nn.Module, list[LowRankLayer]]:
        """The model with W̃ in place of W. It has its own buffers, so that the model keeps those of its full pass."""
        replacements: dict[nn.Module, LowRankLayer] = {}
        for layer in self.layers:
            rank, decomposition = ranks[layer.name], decompositions[layer.name]
            if rank == layer.full_rank:
                factors = None  # nothing is dropped, W̃ = W
            else:
                factors = truncate(to_matrix(layer.weight, layer.form), decomposition, rank)
            for module in layer.modules:
                replacements[module] = LowRankLayer(layer, self._pairs[module], factors, self._layout)
        network = rewire(unwrap(self.model), replacements)
        clone_buffers_(network)
        avoid_fast_paths_(network)
        return network, list(replacements.values())

    def _differentiate(
        self, closure: Closure, network: nn.Module, scaler: torch.amp.GradScaler | None
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor | None]]:
        """The loss of one network, and its gradient for every trainable parameter."""
        loss = closure(network)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgumentError(f"closure: it returned {came}; allowed: a loss, one scalar tensor")
        parameters = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        if not loss.requires_grad or not parameters:
            raise InvalidArgumentError("closure: its loss depends on no trainable parameter; allowed: one that does")
        if not self._has_checked:
            _refuse_reentrant_checkpoints(loss)
            self._has_checked = True
        scaled = loss if scaler is None else scaler.scale(loss)
        gradients = torch.autograd.grad(scaled, parameters, allow_unused=True)
        return loss.detach(), dict(zip(parameters, gradients, strict=True))

    def _check_used(self, low_rank: list[LowRankLayer], full_gradient: Mapping[nn.Parameter, Tensor | None]) -> None:
        """Warn, once, where the second loss was not that of the low-rank network."""
        if self._has_warned or all(layer.has_run for layer in low_rank):
            return
        if not any(layer.has_run for layer in low_rank):
            self._has_warned = True
            warnings.warn(
                "the closure ignores the network it is given, so both losses are the full network's; "
                "use its argument: joint.backward(lambda net: loss(net(x), y))",
                stacklevel=4,
            )
            return
        not_run = {one.name: parameter_of(one.pair.module) for one in low_rank if not one.has_run}
        missed = [name for name, weight in not_run.items() if full_gradient.get(weight) is not None]
        if missed:
            self._has_warned = True
            warnings.warn(
                f"layer '{missed[0]}' ({len(missed)} in all) ran in the full-rank pass but not in the low-rank one: "
                "the model reaches it by a reference that is not a submodule; leave it out with filter_fn",
                stacklevel=4,
            )


def _mix(full: Tensor | None, low: Tensor | None, balance: float, rebalance: bool) -> Tensor | None:
    """(1 − λ) ∇_f + λ ∇̂, where ∇̂ is ∇ scaled to the norm of ∇_f for a decomposed weight (end of appendix A)."""
    if full is None or low is None:
        only, share = (full, 1 - balance) if low is None else (low, balance)
        # A decomposed weight that the full pass did not use has norm 0 there, so ∇̂ = 0.
        return None if only is None or (rebalance and full is None) else only * share
    if rebalance:
        full_norm, low_norm = _norm(full), _norm(low)
        # NaN and infinity stay visible to a GradScaler: 0 · NaN is NaN.
        low_share = balance * torch.where(low_norm > 0, full_norm / low_norm, 0.0)
        return (full * (1 - balance)).addcmul_(low.to(full.dtype), low_share.to(full.dtype))
    return full * (1 - balance) + low.to(full.dtype) * balance


def _norm(gradient: Tensor) -> Tensor:
    """‖·‖_F. On a CPU float32 is several times faster, and float64 is only needed where the squares would not fit."""
    if gradient.device.type == "cpu" and gradient.dtype == torch.float32:
        norm = torch.linalg.vector_norm(gradient)
        if 1e-12 < norm < 1e12:
            return norm
    is_without_float64 = gradient.device.type == "mps"
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if is_without_float64 else torch.float64)


def _own(gradient: Mapping[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
    """Copies: autograd may return one tensor for two parameters, or an expanded one."""
    return {p: None if g is None else g.clone() for p, g in gradient.items()}


@torch.no_grad()
def _accumulate(gradient: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Add to `.grad`, as `backward()` does."""
    for parameter, value in gradient.items():
        if value is None:
            continue
        if parameter.grad is None:
            parameter.grad = value.to(parameter.dtype)
        else:
            parameter.grad = parameter.grad.add_(value.to(parameter.grad.dtype))


def _refuse_reentrant_checkpoints(loss: Tensor) -> None:
    """Their nodes call backward() inside, which autograd.grad leaves out: parameters would get no gradient."""
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


def _check_range(ratio: tuple[float, float] | float) -> tuple[float, float]:
    pair = tuple(ratio) if isinstance(ratio, tuple | list) else (ratio, ratio)
    if len(pair) == 2:
        low, high = (check_ratio("ratio", value) for value in pair)
        if low <= high:
            return low, high
    raise InvalidArgumentError(f"ratio={ratio!r}; allowed: (smallest, largest) with 0 < smallest <= largest <= 1")


def _check_balance(balance: float) -> float:
    if not is_number(balance) or not 0 <= balance <= 1:
        raise InvalidArgumentError(f"balance={balance!r}; allowed: a number from 0 to 1")
    return float(balance)
