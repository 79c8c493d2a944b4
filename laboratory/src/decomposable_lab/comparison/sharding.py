"""A comparison shared out among jobs that know nothing of each other, such as those of a scheduler's array.

    compare … --shard 1/3    compare … --shard 2/3    compare … --shard 3/3        one folder for all of them

Which trainings a shard has follows from the comparison alone, whatever is done already: what starts from another
training is in that one's shard, and shards have none in common. A shard that is running holds a file of the folder, so
that it does not run twice, nor beside one of another split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from decomposable.training.runs import RunError
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.locks import lock_file, unlock_file
from decomposable_lab.comparison.parts import Part

_NAME = re.compile(r"\.shard-(\d+)-of-(\d+)\.lock")


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `count`, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """As it is typed, K/N.

        >>> Shard.parse("2/8")
        Shard(number=2, count=8)
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise InvalidArgumentError(f"--shard {text:.40}; allowed: K/N with 1 <= K <= N, as in 2/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def own(self, parts: Sequence[Part], before: int = 0) -> list[Part]:
        """Its trainings; `before` is how many bundles of trainings were dealt out already, in other folders."""
        dealt = bundles(parts)[(self.number - 1 - before) % self.count :: self.count]
        return [part for bundle in dealt for part in bundle]

    @contextmanager
    def held(self, folder: Path) -> Iterator[None]:
        """Refuse to run what is running already, here or on another machine that has this folder."""
        for other in folder.glob(".shard-*-of-*.lock"):
            found = _NAME.fullmatch(other.name)
            if found is not None and int(found[2]) != self.count and _is_held(other):
                raise RunError(
                    f"--shard {self}: shard {found[1]}/{found[2]} is running in {folder}", "wait until it has ended"
                )
        path = folder / f".shard-{self.number}-of-{self.count}.lock"
        try:
            handle = lock_file(path, wait=False, flags=os.O_CREAT | os.O_RDWR)
        except BlockingIOError as error:
            raise RunError(f"--shard {self}: another process is running it in {folder}") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            unlock_file(handle)


def bundles(parts: Sequence[Part]) -> list[list[Part]]:
    """The trainings in order, those together of which one starts from another."""
    found: dict[Path, list[Part]] = {}
    result: list[list[Part]] = []
    for part in parts:  # what it starts from comes before it
        joined = [found[path] for path in part.needs if path in found]
        bundle = joined[0] if joined else []
        if not joined:
            result.append(bundle)
        for other in joined[1:]:
            if other is not bundle:
                bundle += other
                result = [one for one in result if one is not other]
                found |= {each.path: bundle for each in other}
        bundle.append(part)
        found[part.path] = bundle
    return result


def _is_held(path: Path) -> bool:
    with suppress(FileNotFoundError):
        try:
            unlock_file(lock_file(path, wait=False, flags=os.O_RDWR))
        except BlockingIOError:
            return True
    return False
