"""Checksums of tensors in blocks of rows, so that some rows can be verified without reading the others.

A tensor's rows are its first axis. The bytes of its blocks, each of the same number of rows but for a shorter last one,
have a SHA-256 each. Whoever reads some rows reads the rest of the first and last block of them as well, and no more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    def of(cls, shape: Sequence[int], content: memoryview) -> Blocks:
        """Return those of a tensor of this shape, whose bytes are these.

        >>> blocks = Blocks.of((100, 1024), memoryview(bytes(100 * 4096)))
        >>> blocks.rows, len(blocks.sha256) // DIGITS
        (2, 50)
        """
        count = row_count(shape)
        row_bytes = content.nbytes // max(1, count)
        rows = max(1, -(-count // _MOST_BLOCKS), -(-_LEAST_BYTES // max(1, row_bytes)))
        rows = min(rows, max(1, count))
        starts = range(0, content.nbytes, max(1, rows * row_bytes))
        digests = (hashlib.sha256(content[start : start + rows * row_bytes]).hexdigest() for start in starts)
        return cls(rows, "".join(digests))

    @classmethod
    def from_json(cls, name: str, value: Any, shape: Sequence[int]) -> Blocks:
        """Return those that a file claims for a tensor of this shape."""
        is_pair = isinstance(value, list) and len(value) == 2 and type(value[0]) is int and isinstance(value[1], str)
        require(is_pair, f"tensor '{name}' has no checksums")
        rows, sha256 = value
        is_right = 1 <= rows <= max(1, row_count(shape))
        is_right = is_right and len(sha256) == DIGITS * (-(-row_count(shape) // rows) if 0 not in shape else 0)
        require(is_right, f"tensor '{name}' has not a checksum for each of its blocks")
        return cls(rows, sha256)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Return which rows have to be read to verify these; the end may lie behind the last row."""
        return start // self.rows * self.rows, -(-stop // self.rows) * self.rows

    def verify(self, name: str, start: int, row_bytes: int, parts: Sequence[memoryview]) -> None:
        """Raise unless these bytes, which lie one behind the other from the row `start` on, are what was written.

        They begin where a block begins, and end where one ends.
        """
        block, hasher, number, left = self.rows * row_bytes, hashlib.sha256(), start // self.rows, self.rows * row_bytes

        def compare() -> None:
            if hasher.hexdigest() != self.sha256[DIGITS * number : DIGITS * (number + 1)]:
                raise Corrupt(f"the checksum of tensor '{name}' is wrong: it was damaged or changed")

        for part in parts:
            at = 0
            while at < part.nbytes:
                piece = part[at : at + left]
                hasher.update(piece)
                at, left = at + piece.nbytes, left - piece.nbytes
                if left == 0:
                    compare()
                    hasher, number, left = hashlib.sha256(), number + 1, block
        if left < block:  # the last block may be shorter
            compare()


def row_count(shape: Sequence[int]) -> int:
    """Return the length of the first axis; a single number is one row."""
    return shape[0] if len(shape) else 1
