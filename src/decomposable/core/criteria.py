"""A score per basis: the bases with the smallest scores of the whole network are dropped first (section 2.3).

A criterion is a function from one layer's singular values (descending) to one score per basis. Scores of different
layers are compared with each other, so their scale across layers is what a criterion is about. In its place there may
be the scores themselves, by layer: the k-th basis of a layer then counts the same whatever the weights become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decomposable_edge.errors import InvalidArgumentError

Scores = NDArray[np.float64]
Criterion = Callable[[Scores], Scores]
ScoresByLayer = Mapping[str, Sequence[Scores]]
"""Of each layer, for every cut of its chain, one score per basis in falling order: what `DecomposedNet.scores` is."""


def singular_value(sigma: Scores) -> Scores:
    """Return C(ℓ, i) = σ_{ℓ,i}: the paper's criterion.

    >>> singular_value(np.array([3.0, 1.0])).tolist()
    [3.0, 1.0]
    """
    return sigma


def energy(sigma: Scores) -> Scores:
    """Return 1 − C′(ℓ, i−1): the share of the layer's energy Σσ² that is still missing before basis i is added.

    C′ is the energy criterion of Alvarez (2017) and TRP. The first basis of every layer scores 1.

    >>> energy(np.array([3.0, 1.0])).round(3).tolist()
    [1.0, 0.1]
    """
    squares = np.square(sigma / max(sigma.max(initial=0.0), np.finfo(np.float64).tiny))
    remaining = np.cumsum(squares[::-1])[::-1]  # summed from the small end, so that small tails keep their digits
    return remaining / remaining[0] if remaining.size and remaining[0] > 0 else np.zeros_like(remaining)


def uniform(sigma: Scores) -> Scores:
    """Return the rank left in proportion: every layer keeps the same share of its bases.

    >>> uniform(np.array([3.0, 1.0])).tolist()
    [0.75, 0.25]
    """
    return 1.0 - (np.arange(len(sigma)) + 0.5) / max(1, len(sigma))


CRITERIA: Mapping[str, Criterion] = {"singular_value": singular_value, "energy": energy, "uniform": uniform}


def find_criterion(criterion: str | Criterion | ScoresByLayer) -> Criterion | ScoresByLayer:
    """Return the criterion of that name, the function itself, or copies of scores that are in order."""
    if callable(criterion):
        return criterion
    if isinstance(criterion, Mapping):
        return {name: _checked(name, cuts) for name, cuts in criterion.items()}
    if criterion in CRITERIA:
        return CRITERIA[criterion]
    near = get_close_matches(str(criterion), CRITERIA, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    allowed = (
        f"{', '.join(map(repr, CRITERIA))}, a function of the singular values, scores by layer, or for decompose() "
        "Taylor(loader, loss) and, with data=, 'loss' or 'output'"
    )
    text = f"criterion={criterion!r} is not known here{hint}; allowed: {allowed}"
    raise InvalidArgumentError.about("criterion", criterion, allowed, text)


def _checked(name: str, cuts: Any) -> tuple[Scores, ...]:
    """Return the scores of a layer's cuts, each in falling order; of one cut, they may come by themselves."""
    is_one = isinstance(cuts, np.ndarray) and cuts.ndim == 1
    try:
        found = tuple(np.array(each, np.float64, ndmin=1) for each in ([cuts] if is_one else cuts))
    except (TypeError, ValueError):
        found = ()
    if not found or any(each.ndim > 1 or not np.isfinite(each).all() or (np.diff(each) > 0).any() for each in found):
        allowed = "for each of its cuts finite numbers in falling order, as net.scores has them"
        raise InvalidArgumentError.about("criterion", cuts, allowed, layer=name)
    return found


def scores_of(criterion: Criterion | ScoresByLayer, name: str, spectra: Sequence[Scores]) -> tuple[Scores, ...]:
    """Return one finite number per basis for every cut of a layer, by a criterion or as they are given."""
    if not isinstance(criterion, Mapping):
        found = tuple(np.asarray(criterion(sigma), dtype=np.float64) for sigma in spectra)
        for scores, sigma in zip(found, spectra, strict=True):
            if scores.shape != sigma.shape or not np.isfinite(scores).all():
                came = f"shape {scores.shape}{'' if np.isfinite(scores).all() else ' with NaN or infinity'}"
                allowed = f"{len(sigma)} finite scores"
                raise InvalidArgumentError.about("criterion", came, allowed, why=f"it returned {came}", layer=name)
        return found
    found = tuple(criterion.get(name, ()))
    came_ranks, ranks = [len(each) for each in found], [len(sigma) for sigma in spectra]
    if came_ranks != ranks:
        has = f"scores for {came_ranks} bases" if found else "no scores"
        allowed = f"scores for {ranks} bases, for every layer"
        text = f"criterion: it has {has} of layer '{name}'; allowed: {allowed}"
        raise InvalidArgumentError.about("criterion", came_ranks, allowed, text, layer=name)
    return found
