"""The model as it is, truncated again and again in training, and decomposed after it by the energy criterion."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.methods.base import LineStyle, Material, Method, Training
from decomposable.methods.decomposing import SHORT_FORMS, decomposed
from decomposable.methods.settings import Settings
from decomposable.methods.trp.settings import TRPSettings
from decomposable.methods.trp.step import TRPStep
from decomposable.methods.trp.truncation import layer_filter, truncate_network_
from decomposable.network.decomposed import DecomposedNet


class TRP(Method):
    """Trained Rank Pruning."""

    name = "trp"
    summary = "weights truncated in training to a part of their energy, with the nuclear norm: Trained Rank Pruning"
    label = "TRP"
    style = LineStyle(color="#009E73", marker="^", linestyle="-.", place=3)
    settings = TRPSettings

    def step(self, network: nn.Module, settings: Settings) -> TRPStep:
        """Truncate, one pass, the gradient and that of the nuclear norm."""
        return TRPStep(network, settings)

    def sized(self, network: nn.Module, material: Material, settings: Settings) -> DecomposedNet:
        """A copy that is truncated once more, decomposed by the energy criterion, as the truncation goes.

        The last update has left the weights with their full rank; after this truncation all sizes above the ranks
        that it kept are the same function. Layers that training did not truncate stay dense.
        """
        truncated = deep_copy(rewire(unwrap(network), {}))
        truncate_network_(truncated, settings)
        # The statistics of the training are not those of the truncated weights, not even at full size: hence 1.0.
        by_energy = replace(settings, criterion="energy")
        net = decomposed(truncated, material, by_energy, filter_fn=layer_filter(truncated, settings))
        net.calibrate_(material.calibration, sizes=[1.0], progress=material.progress)
        return net

    def trainings(self, settings: Settings) -> tuple[Training, ...]:
        """One for each form, strength and energy: each has its own size."""
        own = settings.of(TRPSettings)
        return tuple(
            Training(
                curve=f"trp_{SHORT_FORMS[form]} {energy:.12g}-{strength:.12g}",
                folder=f"{SHORT_FORMS[form]}-e{energy:.12g}-tau{strength:.12g}",
                settings={"form": form, "trp_energy": energy, "trp_strength": strength, "criterion": "energy"},
            )
            for form in own.compare_forms
            for strength in own.compare_strengths
            for energy in own.compare_energies
        )


METHOD = TRP()
