"""Checksums of tensors in blocks of rows, so that the first rows can be verified without reading the others.

A tensor's rows are its first axis. The bytes of its blocks, each of the same number of rows but for a shorter last one,
have a SHA-256 each. Whoever reads the first r rows reads the rest of the last block as well, and nothing behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decomposable_edge.fields import Corrupt, require

DIGITS = 64
"""Of one SHA-256."""

_MOST_BLOCKS = 64  # of a tensor: the rest of a block is less than 2% of it
_LEAST_BYTES = 4096  # of a block: a page is what a disk reads, and the digests stay small beside the tensors


@dataclass(frozen=True)
class Blocks:
    """The digests of one tensor's blocks of `rows` rows, one after the other."""

    rows: int
    sha256: str

    @classmethod
    def of(cls, tensor: Tensor) -> Blocks:
        """Those of a tensor that is contiguous in memory.

        >>> blocks = Blocks.of(torch.zeros(100, 1024))
        >>> blocks.rows, len(blocks.sha256) // DIGITS
        (2, 50)
        """
        count, row_bytes = row_count(tensor.shape), tensor.nbytes // max(1, row_count(tensor.shape))
        rows = max(1, -(-count // _MOST_BLOCKS), -(-_LEAST_BYTES // max(1, row_bytes)))
        rows = min(rows, max(1, count))
        content = as_bytes(tensor)
        starts = range(0, content.nbytes, max(1, rows * row_bytes))
        digests = (hashlib.sha256(content[start : start + rows * row_bytes]).hexdigest() for start in starts)
        return cls(rows, "".join(digests))

    @classmethod
    def from_json(cls, name: str, value: Any, shape: Sequence[int]) -> Blocks:
        """Those that a file claims for a tensor of this shape."""
        is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str)
        require(is_pair, f"tensor '{name}' has no checksums")
        rows, sha256 = value
        is_right = 1 <= rows <= max(1, row_count(shape))
        is_right = is_right and len(sha256) == DIGITS * (-(-row_count(shape) // rows) if 0 not in shape else 0)
        require(is_right, f"tensor '{name}' has not a checksum for each of its blocks")
        return cls(rows, sha256)

    def end(self, rows: int) -> int:
        """How many rows have to be read to verify the first `rows`, which may be more than there are."""
        return -(-rows // self.rows) * self.rows

    def verify(self, name: str, kept: Tensor, rest: Tensor | None) -> None:
        """Raise unless these first rows, and the rest of the last block of them, are what was written."""
        content, beyond = as_bytes(kept), b"" if rest is None else as_bytes(rest)
        block = self.rows * (content.nbytes // max(1, row_count(kept.shape)))
        for i, start in enumerate(range(0, content.nbytes, max(1, block))):
            hasher = hashlib.sha256(content[start : start + block])
            if start + block > content.nbytes:
                hasher.update(beyond)
            if hasher.hexdigest() != self.sha256[DIGITS * i : DIGITS * (i + 1)]:
                raise Corrupt(f"the checksum of tensor '{name}' is wrong: it was damaged or changed")


def row_count(shape: Sequence[int]) -> int:
    """The length of the first axis; a single number is one row."""
    return shape[0] if len(shape) else 1


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
