"""A score per basis: the bases with the smallest scores of the whole network are dropped first (section 2.3).

A criterion is a function from one layer's singular values (descending) to one score per basis. Scores of different
layers are compared with each other, so their scale across layers is what a criterion is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from decomposable.errors import InvalidArgumentError

Scores = NDArray[np.float64]
Criterion = Callable[[Scores], Scores]


def singular_value(sigma: Scores) -> Scores:
    """C(ℓ, i) = σ_{ℓ,i}: the paper's criterion.

    >>> singular_value(np.array([3.0, 1.0])).tolist()
    [3.0, 1.0]
    """
    return sigma


def energy(sigma: Scores) -> Scores:
    """1 − C′(ℓ, i−1): the share of the layer's energy Σσ² that is still missing before basis i is added.

    C′ is the energy criterion of Alvarez (2017) and TRP. The first basis of every layer scores 1.

    >>> energy(np.array([3.0, 1.0])).round(3).tolist()
    [1.0, 0.1]
    """
    squares = np.square(sigma / max(sigma.max(initial=0.0), np.finfo(np.float64).tiny))
    remaining = np.cumsum(squares[::-1])[::-1]  # summed from the small end, so that small tails keep their digits
    return remaining / remaining[0] if remaining.size and remaining[0] > 0 else np.zeros_like(remaining)


def uniform(sigma: Scores) -> Scores:
    """The rank left in proportion: every layer keeps the same share of its bases.

    >>> uniform(np.array([3.0, 1.0])).tolist()
    [0.75, 0.25]
    """
    return 1.0 - (np.arange(len(sigma)) + 0.5) / max(1, len(sigma))


CRITERIA: Mapping[str, Criterion] = {"singular_value": singular_value, "energy": energy, "uniform": uniform}


def find_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion of that name, or the function itself."""
    if callable(criterion):
        return criterion
    if criterion in CRITERIA:
        return CRITERIA[criterion]
    near = get_close_matches(str(criterion), CRITERIA, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InvalidArgumentError(
        f"criterion={criterion!r} is not known here{hint}; allowed: {', '.join(map(repr, CRITERIA))}, a function "
        "of the singular values, or for decompose() Taylor(loader, loss) and, with data=, 'loss' or 'output'"
    )


def score(criterion: Criterion, name: str, sigma: Scores) -> Scores:
    """Apply a criterion to one layer and check what it returned: one finite number per basis."""
    scores = np.asarray(criterion(sigma), dtype=np.float64)
    if scores.shape != sigma.shape or not np.isfinite(scores).all():
        raise InvalidArgumentError(
            f"layer '{name}': the criterion returned shape {scores.shape}"
            f"{'' if np.isfinite(scores).all() else ' with NaN or infinity'}; allowed: {len(sigma)} finite scores"
        )
    return scores
