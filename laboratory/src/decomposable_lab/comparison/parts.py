"""What a comparison trains: for every method and seed the trainings that the method asks for, all of it checked before
anything is written.

DIR/METHOD/SEED/record.json             one for each method and seed
DIR/METHOD/SEED/FOLDER/record.json      where a method needs several trainings, one for each of them, too
DIR/comparison.json, comparison.png     all of them together
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decomposable import recipes
from decomposable.network import artifact
from decomposable.recipes.settings import Settings
from decomposable.training import methods, runs
from decomposable.training.devices import choose_device
from decomposable.training.methods import Method
from decomposable.training.methods.flat import flat, with_overrides
from decomposable.training.methods.registry import kinds
from decomposable.training.runs import OtherRunError, RunError, RunFolder, check_same_run
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods import BUILT_IN
from decomposable_lab.methods.base import Training
from decomposable_lab.methods.ours import trainings_of
from decomposable_lab.methods.sweeps import default_settings

RANKS_FROM = "decomposable"  # whose ranks a network has that is trained from scratch


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Describe one training of a comparison."""

    method: str
    seed: int
    training: Training
    settings: Settings
    path: Path
    needs: tuple[Path, ...] = ()  # the folders of the trainings that it starts from; the last one says its ranks

    @property
    def folder(self) -> RunFolder:
        """Return where its files are."""
        return RunFolder(self.path)

    @property
    def name(self) -> str:
        """Return its name, such as "trp/0/sp-e0.999-tau0.0003"."""
        return "/".join(filter(None, (self.method, str(self.seed), self.training.folder)))

    @property
    def is_done(self) -> bool:
        """Return whether there is nothing left to do."""
        return self.folder.record.exists()

    @property
    def lacks(self) -> list[Path]:
        """Return the folders of trainings that it starts from and that are not done, or whose network was not kept."""
        folders = {path: RunFolder(path) for path in self.needs}
        return [path for path, each in folders.items() if not (each.record.exists() and each.network.exists())]

    @property
    def can_be_read(self) -> bool:
        """Return whether it is done, and what says its settings is there, too."""
        return self.is_done and not self.lacks

    @property
    def is_begun(self) -> bool:
        """Return whether it was cut off, and can go on."""
        return not self.is_done and self.folder.checkpoint.exists()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold everything that is trained; `added` names methods that were not asked for, but others start from."""

    recipe: str
    out: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: Settings = field(repr=False)
    parts: tuple[TrainingJob, ...] = field(repr=False)
    added: dict[str, str] = field(default_factory=dict)  # by the method that needs it


def plan(recipe: str, settings: Settings, names: Sequence[str], seeds: Sequence[int], out: Path) -> Comparison:
    """Return all trainings, each after those that it needs."""
    if not names:
        raise InvalidArgumentError(f"--methods: none; allowed: all, or some of {', '.join(methods.METHODS)}")
    if not seeds:
        raise InvalidArgumentError("--seeds: none; allowed: ints of at least 0, as in 0,1")
    wanted = tuple(dict.fromkeys(methods.find(name).name for name in names))
    added = {needed: name for name in wanted for needed in _needed(name, settings) if needed not in wanted}
    # What others start from comes first, what starts from others last: side by side, nothing waits for long.
    order = [name for name in methods.METHODS if name in (*wanted, *added)]
    needed_by_some = {needed for name in order for needed in _needed(name, settings)}
    order.sort(key=lambda name: (name not in needed_by_some, bool(_needed(name, settings))))
    seeds = tuple(dict.fromkeys(seeds))
    parts = tuple(part for seed in seeds for name in order for part in _parts(name, seed, settings, out))
    ordered = tuple(name for name in methods.METHODS if name in wanted)
    return Comparison(recipe=recipe, out=out, methods=ordered, seeds=seeds, settings=settings, parts=parts, added=added)


def _starts_from(training: Training) -> list[str]:
    """Return the methods whose networks, of the same seed, have to be there: for its weights, and for its ranks."""
    ranks_from = None if training.ranks is None else RANKS_FROM
    return [name for name in (training.init, ranks_from) if name is not None]


def _needed(name: str, settings: Settings) -> set[str]:
    return {start for training in trainings_of(name, settings) for start in _starts_from(training)}


def _parts(name: str, seed: int, settings: Settings, out: Path) -> list[TrainingJob]:
    # The sizes that are measured are those that are calibrated, the full one too, as other methods calibrate it: the
    # whole grid is for networks that are to be used.
    own = {"method": name, "seed": seed, "calibrated_sizes": settings.calibrated_sizes or settings.sizes}
    return [
        TrainingJob(
            method=name,
            seed=seed,
            training=training,
            settings=with_overrides(settings, {**own, **training.settings}),
            path=out / name / str(seed) / training.folder,
            needs=tuple(out / start / str(seed) for start in _starts_from(training)),
        )
        for training in trainings_of(name, settings)
    ]


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Hold what all trainings of a comparison share."""

    recipe: str | recipes.Recipe
    data: Path | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""
    guests: tuple[Method, ...] = ()  # the methods that do not come with the package: other processes have to be told

    def task(self, settings: Settings) -> recipes.Task:
        """Return what the recipe trains under these settings."""
        return recipes.make_task(recipes.resolved(self.recipe)[0], self.data, settings)


def prepare(
    recipe: str | recipes.Recipe,
    *,
    out: Path,
    names: str | Sequence[str] = "all",
    seeds: Sequence[int] = (0,),
    data: Path | None = None,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    device: str = "auto",
    checkpoint_seconds: float = 60.0,
    command: str = "",
) -> tuple[Comparison, Circumstances]:
    """Check everything that can be checked before anything is written."""
    function, name = recipes.resolved(recipe)
    default = default_settings(function)
    chosen = with_overrides(settings or default, overrides or {})
    _refuse_what_is_swept(flat(chosen), flat(default))
    recipes.make_task(function, data, chosen)
    runs.check_seconds(checkpoint_seconds)
    RunFolder(out).check(resume=True)
    wanted = [names] if isinstance(names, str) else list(names)
    comparison = plan(name, chosen, list(methods.METHODS) if wanted == ["all"] else wanted, seeds, out)
    for part in comparison.parts:
        if part.training.ranks is None:  # else they are not known yet
            methods.find(part.method).check(part.settings, has_init=part.training.init is not None)
    circumstances = Circumstances(
        recipe=recipe,
        data=data,
        device=choose_device(device),
        checkpoint_seconds=checkpoint_seconds,
        command=command,
        guests=tuple(methods.find(name) for name in sorted({p.method for p in comparison.parts} - BUILT_IN)),
    )
    return comparison, circumstances


def _refuse_what_is_swept(chosen: Mapping[str, Any], default: Mapping[str, Any]) -> None:
    """Settings that a comparison has a value of its own for in each training are chosen in another way."""
    swept = {"method": "--methods", "seed": "--seeds"}
    for kind in kinds():
        swept |= kind.swept
    for key, instead in swept.items():
        if chosen[key] != default[key]:
            raise InvalidArgumentError(f"{key}={chosen[key]}: a comparison sets it itself; allowed: {instead}")


def job_of(part: TrainingJob, circumstances: Circumstances) -> runs.Job:
    """Return the training of a part, as `decomposable-lab train` would make it; what it starts from must be there."""
    settings = part.settings
    if part.training.ranks is not None:
        ranks = artifact.read(RunFolder(part.needs[-1]).network).selector.of_size(part.training.ranks).ranks
        settings = with_overrides(settings, {"ranks": tuple(ranks.values())})
    return runs.prepare(
        circumstances.recipe,
        out=part.path,
        data=circumstances.data,
        settings=settings,
        init=None if part.training.init is None else RunFolder(part.needs[0]).network,
        resume=True,
        device=circumstances.device,
        checkpoint_seconds=circumstances.checkpoint_seconds,
        command=circumstances.command,
        curve=part.training.curve,
        variants=part.training.variants,
    )


def check_finished(comparison: Comparison, circumstances: Circumstances) -> None:
    """Refuse a folder whose finished trainings are of another comparison, before anything is trained."""
    for part in comparison.parts:
        if part.can_be_read:
            finished(part, circumstances)


def finished(part: TrainingJob, circumstances: Circumstances) -> dict[str, Any]:
    """Return the record of a part that is done under these very settings."""
    try:
        record = runs.finished(job_of(part, circumstances), needs_network=False)
        assert record is not None
        stored = {key: record["settings"].get(key) for key in runs.OF_THE_SIZES}
        ours = runs.plain_settings(part.settings)
        check_same_run(part.folder.record, stored, {key: ours[key] for key in runs.OF_THE_SIZES})
        return record
    except OtherRunError as error:
        raise OtherRunError(error.what, "the same settings, or another folder") from error
    except RunError as error:
        raise RunError(error.what, f"remove {part.path} to train it again") from error
