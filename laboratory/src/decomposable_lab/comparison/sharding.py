"""A comparison shared out among jobs that know nothing of each other, such as those of a scheduler's array.

    compare … --shard 1/3    compare … --shard 2/3    compare … --shard 3/3        one folder for all of them

Which trainings a shard has follows from the comparison alone, whatever is done already: what starts from another
training is in that one's shard, and shards have none in common. A shard that is running holds a file of the folder, so
that it does not run twice, nor beside one of another split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from decomposable.training.runs import LOCK, RunError, held
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.locks import holding
from decomposable_lab.comparison.parts import TrainingJob

_NAME = re.compile(r"\.shard-(\d+)-of-(\d+)\.lock")


@dataclass(frozen=True)
class Shard:
    """Name the `number`-th of `count` shards, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse a shard as it is typed, K/N.

        >>> Shard.parse("2/8")
        Shard(number=2, count=8)
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise InvalidArgumentError(f"--shard {text:.40}; allowed: K/N with 1 <= K <= N, as in 2/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def own(self, parts: Sequence[TrainingJob], before: int = 0) -> list[TrainingJob]:
        """Return its trainings; `before` is how many bundles of trainings were dealt out already, in other folders."""
        dealt = bundles(parts)[(self.number - 1 - before) % self.count :: self.count]
        return [part for bundle in dealt for part in bundle]

    @contextmanager
    def held(self, folder: Path) -> Iterator[None]:
        """Refuse to run what is running already, here or on another machine that has this folder."""
        with ExitStack() as stack:
            try:
                stack.enter_context(holding(folder / f".shard-{self.number}-of-{self.count}.lock", wait=False))
            except BlockingIOError as error:
                raise RunError(f"--shard {self}: another process is running it in {folder}") from error
            if _is_held(folder / LOCK):  # after its own: of two that start at once, at least one sees the other
                raise RunError(f"--shard {self}: another process is running in {folder}")
            for number, count in running_shards(folder):
                if count != self.count:
                    raise RunError(
                        f"--shard {self}: shard {number}/{count} is running in {folder}", "wait until it has ended"
                    )
            yield


@contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """Refuse to run beside anything else in a folder, a shard included."""
    with held(folder):
        if running_shards(folder):
            raise RunError(f"--out {folder}: another process is running in it")
        yield


def running_shards(folder: Path) -> list[tuple[int, int]]:
    """Return the shards that are running in a folder: their numbers, and of how many."""
    names = {path: _NAME.fullmatch(path.name) for path in folder.glob(".shard-*-of-*.lock")}
    return [(int(name[1]), int(name[2])) for path, name in names.items() if name is not None and _is_held(path)]


def bundles(parts: Sequence[TrainingJob]) -> list[list[TrainingJob]]:
    """Return the trainings in order, those together of which one starts from another."""
    found: dict[Path, list[TrainingJob]] = {}
    result: list[list[TrainingJob]] = []
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
    if not path.exists():
        return False
    try:
        with holding(path, wait=False):
            return False
    except BlockingIOError:
        return True
