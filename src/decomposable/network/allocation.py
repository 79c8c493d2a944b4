"""How a cut is shared out among the layers: the losses of different layers, made comparable by a short search.

The loss of a layer's bases is told by a model that takes every layer by itself (`core/metric.py`). For large cuts it
misjudges layers as a whole: what is lost in one changes what the others see. So a layer's losses are divided by a power
of their own sum,

    loss_k / (Σ_k loss_k)^e      e = 0: as they are      e = 1: relative to what the layer has,

and e is the one of a few, reached by steps up or down, whose network of the wanted size is nearest to the full one, by
KL(full ‖ cut) on images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from decomposable.core.distillation import kl_divergence, logits_of
from decomposable.core.tracing import Forward
from decomposable.errors import InvalidArgumentError
from decomposable.network.calibration.statistics import run_normalising, tracked_batch_norms

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
IMAGES = 128
"""So many, in whole batches, tell how near a network is to the full one."""

Numbers = NDArray[np.float64]


def shared_out(losses: Mapping[str, Numbers], exponent: float) -> dict[str, Numbers]:
    """The losses of every layer's bases, divided by this power of their sum.

    >>> shared_out({"fc": np.array([3.0, 1.0])}, 0.5)["fc"].tolist()
    [1.5, 0.5]
    """
    return {name: each / max(each.sum(), np.finfo(np.float64).tiny) ** exponent for name, each in losses.items()}


def best_exponent(distance: Callable[[float], float], start: float) -> float:
    """The exponent of the smallest distance, uphill and downhill from `start` as long as it falls.

    >>> best_exponent(lambda e: abs(e - 0.6), 0.0)
    0.5
    """
    known: dict[int, float] = {}

    def of(index: int) -> float:
        if not 0 <= index < len(EXPONENTS):
            return np.inf
        if index not in known:
            known[index] = distance(EXPONENTS[index])
        return known[index]

    best = EXPONENTS.index(start)
    for step in (1, -1):
        while of(best + step) < of(best):
            best += step
    return EXPONENTS[best]


@dataclass(frozen=True, eq=False)
class Judge:
    """Some images, and what the full network says of them."""

    batches: tuple[Any, ...]
    outputs: tuple[Tensor, ...]
    forward: Forward

    @classmethod
    def of(cls, network: nn.Module, batches: Iterable[Any], forward: Forward) -> Judge:
        """One for this network as it is."""
        seen, kept, outputs = 0, [], []
        for batch in batches:
            if seen >= IMAGES:
                break
            with torch.no_grad():
                found = logits_in(forward(network, batch))
            seen += len(found)
            kept.append(batch)
            outputs.append(found)
        return cls(tuple(kept), tuple(outputs), forward)

    def distance(self, network: nn.Module) -> float:
        """KL(full ‖ network), the mean over the images, with the network's normalisation by their own statistics."""
        with torch.no_grad(), _by_batch(network):
            answers = (run_normalising(self.forward, network, batch, asker="decompose") for batch in self.batches)
            pairs = zip(answers, self.outputs, strict=True)
            found = [float(kl_divergence(logits_in(answer), full)) * len(full) for answer, full in pairs]
        return sum(found) / max(1, sum(map(len, self.outputs)))


def logits_in(outputs: Any) -> Tensor:
    """The logits in what a network returns, a row for each position; what has none is refused, in the name of the
    criterion that needs them.
    """
    try:
        return logits_of(outputs).flatten(0, -2)
    except InvalidArgumentError:
        came = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidArgumentError(
            f"criterion='loss': the network gives {came}; allowed: a matrix of logits, an output that has logits, or "
            "criterion='output'"
        ) from None


@contextmanager
def _by_batch(network: nn.Module) -> Iterator[None]:
    """Inside, batch normalisation goes by the statistics of each batch; those that it keeps stay as they are."""
    norms = [norm for norm in tracked_batch_norms(network).values() if not norm.training]
    kept = [norm._buffers for norm in norms]
    for norm in norms:
        norm._buffers = {name: None if each is None else each.clone() for name, each in norm._buffers.items()}
        norm.training = True
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers, norm.training = buffers, False
