"""Trained Rank Pruning (Xu et al. 2019, "TRP"): the network is pushed to low rank while it is trained.

In steps 0, T, 2T, …

    before the pass:  W ← U_r S_r V_rᵀ, in place, with the smallest r that keeps the part e of the energy Σσ²
    after it:         ∂L/∂W ← ∂L/∂W + τ U_r V_rᵀ, the nuclear norm's, so that small singular values go on shrinking

and in between it is a plain step. One training gives a network that is good at one size, which e and τ decide; the
paper's curves `trp_sp 0.999-0.0003` and so on are such networks, of the spatial form with e = 0.999 and τ = 0.0003, at
sizes by the energy criterion.

Shape suffixes: M, N rows and columns of a weight's matrix; R the bases that are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from decomposable.core.criteria import Scores
from decomposable.core.criteria import energy as missing_energy
from decomposable.core.forms import MATRIX_FORMS, check_matrix_form, short_form, to_matrix, to_weight
from decomposable.core.layers import FilterFn, Layer, find_layers, require_layers, without_transposed
from decomposable.core.svd import SVD, numerical_rank, svd
from decomposable.core.tree import deep_copy, plain_name, rewire, unwrap
from decomposable.network.decomposed import DecomposedNet
from decomposable.recipes.settings import Settings
from decomposable.recipes.values import Check, MethodSettings, is_one_of
from decomposable.training.methods.base import CalibrationData, Closure
from decomposable.training.methods.decomposing import decomposed
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.base import LineStyle, Rival, Training


@dataclass(frozen=True, kw_only=True)
class TRPSettings(MethodSettings):
    """Hold how much is truncated and how often; the sweeps are the paper's for CIFAR."""

    trp_energy: float = 0.999  # e, the part of the energy Σσ² that truncation keeps
    trp_strength: float = 3e-4  # τ, of the nuclear norm
    trp_interval: int = 1  # T, steps from one truncation to the next
    trp_layers: str = "all"  # or "inner", as in its authors' code: convolutions but the first and those of 1 × 1

    compare_energies: tuple[float, ...] = (0.995, 0.999, 0.9995, 0.9999)
    compare_strengths: tuple[float, ...] = (1e-4, 3e-4)
    compare_forms: tuple[str, ...] = MATRIX_FORMS

    swept: ClassVar[Mapping[str, str]] = {"trp_energy": "compare_energies", "trp_strength": "compare_strengths"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("trp_energy",), "a part of the energy in (0, 1]", lambda v: 0 < v <= 1),
        (("trp_strength",), "a number of at least 0", lambda v: 0 <= v < inf),
        (("trp_interval",), "an int of at least 1", lambda v: v >= 1),
        (("trp_layers",), "all, inner", is_one_of("all", "inner")),
        (("compare_energies",), "parts of the energy, as in 0.99,0.999", lambda v: v and all(0 < e <= 1 for e in v)),
        (("compare_strengths",), "numbers of at least 0", lambda v: v and all(0 <= t < inf for t in v)),
        (("compare_forms",), f"{', '.join(MATRIX_FORMS)} or both", lambda v: v and {*v} <= {*MATRIX_FORMS}),
    )


class TRPStep:
    """Add the gradient of the loss and, every T steps, that of the nuclear norm at weights that were truncated before.

    Attributes:
        ranks: of every layer that is truncated, by name, as the last truncation left it.
    """

    def __init__(self, network: nn.Module, settings: Settings) -> None:
        self.network = network
        own = settings.of(TRPSettings)
        self.energy, self.strength, self.interval = own.trp_energy, own.trp_strength, own.trp_interval
        self.layers = selected_layers(network, settings)
        self.ranks = {layer.name: layer.full_ranks[0] for layer in self.layers}
        self._full_ranks = sum(self.ranks.values())
        self._steps = 0

    def backward(self, closure: Closure) -> dict[str, Tensor | float]:
        """Truncate where it is due, then add the gradient; "kept" is the part of all bases that is left."""
        bases = self._truncate() if self._steps % self.interval == 0 else None
        loss = closure(self.network)
        loss.backward()
        if bases is not None:
            _add_subgradients_(self.layers, bases, self.strength)
        self._steps += 1
        return {"loss": loss.detach(), "kept": sum(self.ranks.values()) / self._full_ranks}

    def _truncate(self) -> dict[str, SVD] | None:
        """Return the bases that are left of every layer; None where there was no SVD."""
        try:
            bases = _truncate_(self.layers, self.energy)
        except torch.linalg.LinAlgError as error:
            warnings.warn(f"the SVD failed, this step does not truncate: {error}", stacklevel=3)
            return None
        self.ranks = _ranks_of(bases)
        return bases

    def state_dict(self) -> dict[str, Any]:
        """Return the steps made, which say when the next truncation is due, and the ranks, which are logged."""
        return {"steps": self._steps, "ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        ranks = state.get("ranks")
        if "steps" not in state or not isinstance(ranks, Mapping) or list(ranks) != list(self.ranks):
            raise InvalidArgumentError("state: it is not of these layers; allowed: what state_dict() returned")
        self._steps = int(state["steps"])
        self.ranks = {name: int(rank) for name, rank in ranks.items()}


class TRP(Rival):
    """Truncate the model again and again in training, and decompose it afterwards by the energy criterion."""

    name = "trp"
    summary = "weights truncated in training to a part of their energy, with the nuclear norm: Trained Rank Pruning"
    label = "TRP"
    style = LineStyle(color="#009E73", marker="^", linestyle="-.", place=3)
    settings = TRPSettings

    def step(self, network: nn.Module, settings: Settings) -> TRPStep:
        """Truncate, one pass, the gradient and that of the nuclear norm."""
        return TRPStep(network, settings)

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> DecomposedNet:
        """Return a copy that is truncated once more, decomposed by the energy criterion, as the truncation goes.

        The last update has left the weights with their full rank; after this truncation all sizes above the ranks
        that it kept are the same function. Layers that training did not truncate stay dense.
        """
        truncated = deep_copy(rewire(unwrap(network), {}))
        truncate_network_(truncated, settings)
        # The statistics of the training are not those of the truncated weights, not even at full size: hence 1.0.
        by_energy = replace(settings, criterion="energy")
        net = decomposed(truncated, material, by_energy, filter_fn=_layer_filter(truncated, settings))
        net.calibrate_(material.calibration, sizes=[1.0], progress=material.progress)
        return net

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """Return one for each form, strength and energy: each has its own size."""
        own = settings.of(TRPSettings)
        return tuple(
            Training(
                curve=f"trp_{short_form(form)} {energy:.12g}-{strength:.12g}",
                folder=f"{short_form(form)}-e{energy:.12g}-tau{strength:.12g}",
                settings={"form": form, "trp_energy": energy, "trp_strength": strength, "criterion": "energy"},
            )
            for form in own.compare_forms
            for strength in own.compare_strengths
            for energy in own.compare_energies
        )


def _layer_filter(network: nn.Module, settings: Settings) -> FilterFn | None:
    """Return which layers take part, by `trp_layers`."""
    if settings.of(TRPSettings).trp_layers == "all":
        return None
    # By name: it is asked about copies of the network, too.
    convolutions = (plain_name(name) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)

    def is_inner(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Conv2d) and name != first and tuple(module.kernel_size) != (1, 1)

    return is_inner


def selected_layers(network: nn.Module, settings: Settings) -> tuple[Layer, ...]:
    """Return the layers that are truncated."""
    network = unwrap(network)
    taken = without_transposed(_layer_filter(network, settings))
    layers, skipped = find_layers(network, check_matrix_form(settings.form, "trp"), taken)
    if not layers and settings.of(TRPSettings).trp_layers == "inner":
        raise InvalidArgumentError(
            "trp_layers=inner: the model has no convolution but the first and those of 1 × 1; allowed: all"
        )
    require_layers(layers, skipped)
    return layers


def truncate_network_(network: nn.Module, settings: Settings) -> dict[str, int]:
    """Truncate every selected layer in place; the ranks kept come back by name.

    >>> model = nn.Linear(3, 3, bias=False)
    >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([3.0, 2.0, 0.1])))
    >>> truncate_network_(model, Settings(of_methods=(TRPSettings(trp_energy=0.99),)))
    {'': 2}
    >>> round(model.weight[2, 2].item(), 6)
    0.0
    """
    return _ranks_of(_truncate_(selected_layers(network, settings), settings.of(TRPSettings).trp_energy))


def _ranks_of(kept: Mapping[str, SVD]) -> dict[str, int]:
    """Return how many bases of each layer there are."""
    return {name: len(bases.s) for name, bases in kept.items()}


def _rank_for(sigma: Scores, energy: float) -> int:
    """Return the smallest rank r with Σ_{i≤r} σ_i² ≥ e Σ σ_i², and at least 1.

    It is counted by what is missing: 1 − e is a small number, and its digits would be lost in a sum from the large end.

    >>> _rank_for(np.array([3.0, 2.0, 0.1]), 0.99), _rank_for(np.array([3.0, 2.0, 0.1]), 1.0)
    (2, 3)
    >>> _rank_for(np.zeros(3), 1.0)
    1
    """
    return max(1, int((missing_energy(sigma) > 1 - energy).sum()))


@torch.no_grad()
def _truncate_(layers: Sequence[Layer], energy: float) -> dict[str, SVD]:
    """W ← U_r S_r V_rᵀ for every layer, with r of `_rank_for`; U_r, S_r and V_r come back by name.

    The parameter stays the same object, in the same layout. Bases with σ = 0 (to rounding) are not counted as kept, and
    a weight from which nothing else is dropped is not written at all: with e = 1 every weight keeps its bits.
    """
    matrices = {layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in layers}
    with torch.autocast(layers[0].weight.device.type, enabled=False):
        decompositions = svd(matrices)
        sigmas = _on_the_host([decompositions[layer.name].s for layer in layers])
        kept = {}
        for layer, sigma in zip(layers, sigmas, strict=True):
            decomposition = decompositions[layer.name]
            most = max(1, numerical_rank(decomposition.s))
            rank = min(_rank_for(sigma, energy), most)
            if rank < most:
                w_MN = _low_rank(matrices[layer.name], decomposition, rank)
                layer.weight.copy_(to_weight(w_MN, layer.shape, layer.form))
            kept[layer.name] = SVD(*(part[..., :rank] for part in decomposition))
    return kept


def _on_the_host(values: Sequence[Tensor]) -> list[Scores]:
    """Return every layer's singular values in numpy, in one transfer."""
    together = torch.cat([value.double() for value in values]).cpu().numpy()
    return np.split(together, np.cumsum([len(value) for value in values])[:-1])


def _low_rank(w_MN: Tensor, decomposition: SVD, rank: int) -> Tensor:
    """U_r S_r V_rᵀ: the bases that are kept or, where they are fewer, W without those that are dropped."""
    u_MK, s_K, v_NK = decomposition
    if 2 * rank <= len(s_K):
        return (u_MK[:, :rank] * s_K[:rank]) @ v_NK[:, :rank].mT
    return w_MN.to(s_K.dtype) - (u_MK[:, rank:] * s_K[rank:]) @ v_NK[:, rank:].mT


@torch.no_grad()
def _add_subgradients_(layers: Sequence[Layer], kept: Mapping[str, SVD], strength: float) -> None:
    """Add τ U_r V_rᵀ to the gradient of every weight: a subgradient of τ‖W‖_* = τ Σσ at W = U_r S_r V_rᵀ.

    All of them are U_r V_rᵀ + Z with Z orthogonal to these bases and ‖Z‖₂ ≤ 1; this one leaves the bases that were
    dropped alone.
    """
    for layer in layers:
        weight, bases = layer.weight, kept[layer.name]
        if strength == 0 or not weight.requires_grad:
            continue
        if weight.grad is None:  # the pass did not come by
            weight.grad = torch.zeros_like(weight)
        uv_MN = bases.u @ bases.v.mT
        weight.grad.add_(to_weight(uv_MN, layer.shape, layer.form).to(weight.grad.dtype), alpha=strength)


METHOD = TRP()
