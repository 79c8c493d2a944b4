"""Trained Rank Pruning (Xu et al. 2019, "TRP"): the network is pushed to low rank while it is trained.

Every T steps each weight matrix is truncated in place to the rank that keeps the part e of its energy Σσ², and the
gradient of that step gets the nuclear norm's, τ U Vᵀ, so that small singular values go on shrinking. One training
gives a network that is good at one size, which e and τ decide; the paper's curves `trp_sp 0.999-0.0003` and so on are
such networks, of the spatial form with e = 0.999 and τ = 0.0003, at sizes by the energy criterion.
"""

from decomposable.methods.trp.method import METHOD

__all__ = ["METHOD"]
