"""What a comparison trains: for every method and seed the trainings that the method asks for.

DIR/METHOD/SEED/record.json             one for each method and seed
DIR/METHOD/SEED/FOLDER/record.json      where a method needs several trainings, one for each of them, too
DIR/comparison.json, comparison.png     all of them together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decomposable import methods
from decomposable.errors import InvalidArgumentError
from decomposable.methods import Training
from decomposable.methods.settings import Settings, with_overrides
from decomposable.training.runs import RunFolder

RANKS_FROM = "decomposable"  # whose ranks a network has that is trained from scratch


@dataclass(frozen=True, kw_only=True)
class Part:
    """One training of a comparison."""

    method: str
    seed: int
    training: Training
    settings: Settings
    path: Path
    needs: tuple[Path, ...] = ()  # the folders of the trainings that it starts from
    ranks_from: Path | None = None  # the network file that says its ranks

    @property
    def folder(self) -> RunFolder:
        """Where its files are."""
        return RunFolder(self.path)

    @property
    def name(self) -> str:
        """Such as "trp/0/sp-e0.999-tau0.0003"."""
        return "/".join(filter(None, (self.method, str(self.seed), self.training.folder)))

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.folder.record.exists()

    @property
    def lacks(self) -> list[Path]:
        """The folders of trainings that it starts from and that are not done."""
        return [path for path in self.needs if not RunFolder(path).record.exists()]

    @property
    def can_be_read(self) -> bool:
        """Whether it is done, and what says its settings is there, too."""
        return self.is_done and not self.lacks

    @property
    def is_begun(self) -> bool:
        """Whether it was cut off, and can go on."""
        return not self.is_done and self.folder.checkpoint.exists()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that is trained; `added` names methods that nobody asked for, but others start from."""

    recipe: str
    out: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    added: dict[str, str] = field(default_factory=dict)  # by the method that needs it


def plan(recipe: str, settings: Settings, names: Sequence[str], seeds: Sequence[int], out: Path) -> Comparison:
    """All trainings, each after those that it needs."""
    if not names:
        raise InvalidArgumentError(f"--methods: none; allowed: all, or some of {', '.join(methods.METHODS)}")
    if not seeds:
        raise InvalidArgumentError("--seeds: none; allowed: ints of at least 0, as in 0,1")
    wanted = tuple(dict.fromkeys(methods.find(name).name for name in names))
    added = {}
    for name in wanted:
        for needed in _needed(name, settings):
            if needed not in wanted:
                added[needed] = name
    # What others start from comes first, what starts from others last: side by side, nothing waits for long.
    order = [name for name in methods.METHODS if name in (*wanted, *added)]
    needed_by_some = {needed for name in order for needed in _needed(name, settings)}
    order.sort(key=lambda name: (name not in needed_by_some, bool(_needed(name, settings))))
    parts = [part for seed in dict.fromkeys(seeds) for name in order for part in _parts(name, seed, settings, out)]
    ordered = tuple(name for name in methods.METHODS if name in wanted)
    return Comparison(
        recipe=recipe,
        out=out,
        methods=ordered,
        seeds=tuple(dict.fromkeys(seeds)),
        settings=settings,
        parts=tuple(parts),
        added=added,
    )


def _needed(name: str, settings: Settings) -> set[str]:
    """The methods that one starts from."""
    trainings = methods.find(name).trainings(settings)
    return {t.init for t in trainings if t.init is not None} | {RANKS_FROM for t in trainings if t.ranks is not None}


def _parts(name: str, seed: int, settings: Settings, out: Path) -> list[Part]:
    base = out / name / str(seed)
    # The sizes that are measured are those that are calibrated, the full one too, as other methods calibrate it: the
    # whole grid is for networks that are to be used.
    calibrated = settings.calibrated_sizes or settings.sizes
    parts = []
    for training in methods.find(name).trainings(settings):
        own = {"method": name, "seed": seed, "calibrated_sizes": calibrated, **training.settings}
        needs = [out / training.init / str(seed)] if training.init is not None else []
        ranks_from = None
        if training.ranks is not None:
            needs.append(out / RANKS_FROM / str(seed))
            ranks_from = needs[-1] / "network.safetensors"
        parts.append(
            Part(
                method=name,
                seed=seed,
                training=training,
                settings=with_overrides(settings, own),
                path=base / training.folder if training.folder else base,
                needs=tuple(needs),
                ranks_from=ranks_from,
            )
        )
    return parts
