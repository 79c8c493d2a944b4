"""A comparison as it was asked for, checked before anything is written, and the training that each part stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decomposable import methods, recipes
from decomposable.comparison.parts import Comparison, Part, plan
from decomposable.errors import InvalidArgumentError
from decomposable.methods import Method
from decomposable.methods.registry import BUILT_IN, kinds
from decomposable.methods.settings import Settings, flat, with_overrides
from decomposable.network import artifact
from decomposable.training import job
from decomposable.training.devices import choose_device
from decomposable.training.runs import OtherRunError, RunError, RunFolder, check_same_run


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What all trainings of a comparison share."""

    recipe: str | recipes.Recipe
    data: Path | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""
    guests: tuple[Method, ...] = ()  # the methods that do not come with the package: other processes have to be told

    def task(self, settings: Settings) -> recipes.Task:
        """What the recipe trains under these settings."""
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
    default = recipes.default_settings(function)
    chosen = with_overrides(settings or default, overrides or {})
    _refuse_what_is_swept(flat(chosen), flat(default))
    recipes.make_task(function, data, chosen)
    job.check_seconds(checkpoint_seconds)
    if out.exists() and not out.is_dir():
        raise InvalidArgumentError(f"--out {out}: it is a file; allowed: a folder")
    wanted = [names] if isinstance(names, str) else list(names)
    comparison = plan(name, chosen, list(methods.METHODS) if wanted == ["all"] else wanted, seeds, out)
    for part in comparison.parts:
        if part.ranks_from is None:  # else its ranks are not known yet
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


def job_of(part: Part, circumstances: Circumstances) -> job.Job:
    """The training of a part, as `decomposable train` would make it; what it starts from must be there."""
    settings = part.settings
    if part.ranks_from is not None:
        assert part.training.ranks is not None
        ranks = artifact.read(part.ranks_from).selector.of_size(part.training.ranks).ranks
        settings = with_overrides(settings, {"ranks": tuple(ranks.values())})
    return job.prepare(
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


def finished(part: Part, circumstances: Circumstances) -> dict[str, Any]:
    """The record of a part that is done under these very settings."""
    try:
        record = job.finished(job_of(part, circumstances))
        assert record is not None
        stored = {key: record["settings"].get(key) for key in job.OF_THE_SIZES}
        ours = job.plain_settings(part.settings)
        check_same_run(part.folder.record, stored, {key: ours[key] for key in job.OF_THE_SIZES})
        return record
    except OtherRunError as error:
        raise OtherRunError(error.what, "the same settings, or another folder") from error
    except RunError as error:
        raise RunError(error.what, f"remove {part.path} to train it again") from error
