"""The settings of Trained Rank Pruning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from decomposable.methods.values import Check, MethodSettings, is_one_of


@dataclass(frozen=True, kw_only=True)
class TRPSettings(MethodSettings):
    """How much is truncated and how often; the sweeps are the paper's for CIFAR."""

    trp_energy: float = 0.999  # e, the part of the energy Σσ² that truncation keeps
    trp_strength: float = 3e-4  # τ, of the nuclear norm
    trp_interval: int = 1  # T, steps from one truncation to the next
    trp_layers: str = "all"  # or "inner", as in its authors' code: convolutions but the first and those of 1 × 1

    compare_energies: tuple[float, ...] = (0.995, 0.999, 0.9995, 0.9999)
    compare_strengths: tuple[float, ...] = (1e-4, 3e-4)
    compare_forms: tuple[str, ...] = ("spatial", "channel")

    swept: ClassVar[Mapping[str, str]] = {"trp_energy": "compare_energies", "trp_strength": "compare_strengths"}
    checks: ClassVar[tuple[Check, ...]] = (
        (("trp_energy",), "a part of the energy in (0, 1]", lambda v: 0 < v <= 1),
        (("trp_strength",), "a number of at least 0", lambda v: 0 <= v < inf),
        (("trp_interval",), "an int of at least 1", lambda v: v >= 1),
        (("trp_layers",), "all, inner", is_one_of("all", "inner")),
        (("compare_energies",), "parts of the energy, as in 0.99,0.999", lambda v: v and all(0 < e <= 1 for e in v)),
        (("compare_strengths",), "numbers of at least 0", lambda v: v and all(0 <= t < inf for t in v)),
        (("compare_forms",), "spatial, channel or both", lambda v: v and {*v} <= {"spatial", "channel"}),
    )
