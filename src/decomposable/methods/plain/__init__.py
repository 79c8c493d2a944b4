"""Normal learning: the loss of the full network. Afterwards it is decomposed, and nothing is trained again.

The paper's baselines: `base_sp_sv` is its spatial form with the singular values as the criterion, `base_ch_eng` the
channel form with the energy, and so on.
"""

from decomposable.methods.plain.method import METHOD

__all__ = ["METHOD"]
