"""The weights of a layer at a size, in numpy: slices of its factors, or one dense weight; `forms.py` has the forms."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from decomposable.edge.arrays import Array
from decomposable.edge.source import Stored
from decomposable.locks import ForkLock
from decomposable.sizing.cost import LayerShape


def dense_weight(first: Array, second: Array, form: str) -> Array:
    """W̃ that two factors stand for."""
    exact = np.float32 if first.dtype == np.float16 else first.dtype  # numpy is slow and coarse in half precision
    rank, out_channels = first.shape[0], second.shape[0]
    left = first.reshape(rank, -1).astype(exact, copy=False)
    if form == "spatial":
        height, (in_channels, width) = second.shape[2], (first.shape[1], first.shape[3])
        right = second[..., 0].swapaxes(1, 2).reshape(out_channels * height, rank).astype(exact, copy=False)
        w_OHIW = (right @ left).reshape(out_channels, height, in_channels, width)
        return np.ascontiguousarray(w_OHIW.swapaxes(1, 2), dtype=first.dtype)
    right = second.reshape(out_channels, rank).astype(exact, copy=False)
    return (right @ left).reshape(out_channels, *first.shape[1:]).astype(first.dtype, copy=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights(LayerShape):
    """All bases of one layer, which lie in the file; those of the largest size that was taken are in memory.

    The dense weight is computed when it is first needed, and kept. A layer that only training uses has shapes, which
    say how many bases there are, but no weights.
    """

    first: Array | Stored
    second: Array | Stored
    is_used: bool = True
    _read: list[tuple[Array, Array]] = field(default_factory=list)
    _kept: dict[int, Array] = field(default_factory=dict)
    _lock: ForkLock = field(default_factory=ForkLock)

    @property
    def stored(self) -> int:
        """How many bases there are."""
        return len(self.first)

    def pair(self, rank: int) -> tuple[Array, Array]:
        """The first r bases, as views of those that are in memory; more are read where these are too few."""
        with self._lock:
            if not self._read or len(self._read[0][0]) < rank:
                self._read.clear()  # before the larger ones are read
                self._read.append((self.first[:rank], self.second[:, :rank]))
            first, second = self._read[0]
        return first[:rank], second[:, :rank]

    def dense(self, rank: int, *, keep: bool) -> Array:
        """W̃ of the first r bases; with `keep`, it is there at once the next time."""
        with self._lock:
            if rank in self._kept:
                return self._kept[rank]
            is_read = bool(self._read) and len(self._read[0][0]) >= rank
            pair = self.pair(rank) if is_read else (self.first[:rank], self.second[:, :rank])  # not needed any more
            weight = dense_weight(*pair, self.form)
            if keep:
                self._kept.clear()  # one per layer: memory is scarce where this runs
                self._kept[rank] = weight
            return weight
