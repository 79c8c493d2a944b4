"""Normal learning: the loss of the full network. Afterwards it is decomposed, and nothing is trained again.

The paper's baselines: `base_sp_sv` is its spatial form with the singular values as the criterion, `base_ch_eng` the
channel form with the energy, and so on.
"""

from __future__ import annotations

from torch import nn

from decomposable.network.decomposed import DecomposedNet
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData, Method
from decomposable.training.methods.decomposing import decomposed


class Plain(Method):
    """Normal learning."""

    name = "plain"
    summary = "normal learning, decomposed afterwards by both forms and every criterion"
    label = "normal learning, decomposed"

    def sized(self, network: nn.Module, material: CalibrationData, settings: Settings) -> DecomposedNet:
        """Decomposed by the form and the criterion of the settings."""
        return decomposed(network, material, settings)


METHOD = Plain()
