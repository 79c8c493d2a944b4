"""Train what is missing, go on with what was cut off, leave alone what is done; then gather the records."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decomposable import methods, recipes
from decomposable.comparison.parts import Comparison, Part, plan
from decomposable.comparison.results import summary
from decomposable.comparison.scheduling import Failures, one_by_one, side_by_side
from decomposable.comparison.watching import Watch, Watchers
from decomposable.comparison.workers import cores
from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.files import write_atomically
from decomposable.methods import Method
from decomposable.methods.registry import BUILT_IN, kinds
from decomposable.methods.settings import Settings, flat, with_overrides
from decomposable.network import artifact
from decomposable.progress import Progress, Report, quiet, shown
from decomposable.training import experiment
from decomposable.training.devices import choose_device
from decomposable.training.loop import Say
from decomposable.training.runs import RunError, RunFolder, check_same_run, held

MOST_JOBS = 4  # side by side unless more are asked for: each takes the memory of a training
_NOBODY = Watchers()


class PartsFailedError(DecomposableError):
    """Some trainings of a comparison failed."""

    def __init__(self, failures: Failures, total: int) -> None:
        name, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        others = "the others are done, and " if len(failures) < total else ""
        super().__init__(f"{name}{more}: {reason}; {others}the same command tries again")


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
        function = recipes.find(self.recipe) if isinstance(self.recipe, str) else self.recipe
        return recipes.make_task(function, self.data, settings)


def compare(
    recipe: str | recipes.Recipe,
    *,
    out: Path | str,
    methods: str | Sequence[str] = "all",
    seeds: Sequence[int] = (0,),
    data: Path | str | None = None,
    device: str = "auto",
    jobs: int | None = None,
    checkpoint_seconds: float = 60.0,
    progress: Report | None = None,
    say: Say = quiet,
    **settings: Any,
) -> dict[str, Any]:
    """`decomposable compare` from Python: train and measure several methods under one protocol.

    Args:
        recipe: a built-in name, ``"package.module:function"``, or the function itself.
        out: the folder of the comparison; what is done in it is not done again.
        methods: their names, or "all".
        seeds: each method is trained with each of them.
        data: where the data set is.
        device: "auto", "cpu", "cuda" …
        jobs: how many trainings run side by side; by default one on a GPU, and on a CPU one for each core, up to four.
            More than one needs ``if __name__ == "__main__":`` around the program, as all of multiprocessing does.
        checkpoint_seconds: from one checkpoint to the next.
        progress: called with a `Progress`, which is text, about what is under way; by default it is shown on a
            terminal. `decomposable.progress.quiet` shows nothing.
        say: called with a line for every training that is done.
        **settings: of the recipe, to be replaced, such as ``epochs=10``.

    Returns the content of ``comparison.json``: for every method its curves, mean and spread over the seeds. Where some
    trainings failed, `PartsFailedError` says which and why; the others are there.
    """
    comparison, circumstances = prepare(
        recipe,
        out=Path(out),
        names=methods,
        seeds=seeds,
        data=None if data is None else Path(data),
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        overrides=settings,
    )
    with shown(progress) as report:
        content, failures = run(comparison, circumstances, jobs=jobs, watchers=Watchers(progress=report, say=say))
    if failures:
        raise PartsFailedError(failures, len(comparison.parts))
    return content


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
    function = recipes.find(recipe) if isinstance(recipe, str) else recipe
    name = recipe if isinstance(recipe, str) else f"{function.__module__}:{function.__qualname__}"
    default = recipes.default_settings(function)
    chosen = with_overrides(settings or default, overrides or {})
    _refuse_what_is_swept(flat(chosen), flat(default))
    recipes.make_task(function, data, chosen)
    if not checkpoint_seconds >= 0:
        raise InvalidArgumentError(f"--checkpoint-seconds {checkpoint_seconds:g}; allowed: a number of at least 0")
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


def job_of(part: Part, circumstances: Circumstances) -> experiment.Job:
    """The training of a part, as `decomposable train` would make it; what it starts from must be there."""
    settings = part.settings
    if part.ranks_from is not None:
        assert part.training.ranks is not None
        ranks = artifact.read(part.ranks_from).selector.of_size(part.training.ranks).ranks
        settings = with_overrides(settings, {"ranks": tuple(ranks.values())})
    return experiment.prepare(
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


def run(
    comparison: Comparison,
    circumstances: Circumstances,
    *,
    jobs: int | None = None,
    watchers: Watchers = _NOBODY,
) -> tuple[dict[str, Any], Failures]:
    """Train what is missing, then write every method's record and the summary; it comes back, and what failed."""
    count = number_of_jobs(jobs, circumstances.device)
    check_finished(comparison, circumstances)
    missing = [part for part in comparison.parts if not part.is_done]
    at_once = min(count, len(missing))
    if at_once > 1:
        _check_sendable(circumstances, at_once)
    if missing:
        watchers.progress(Progress("", "checking recipe and data"))
        experiment.try_out(circumstances.task(comparison.settings), comparison.settings, circumstances.device)
    for needed, name in comparison.added.items():
        watchers.say(f"{needed} is trained as well: {name} starts from it")
    if len(missing) < len(comparison.parts):
        watchers.say(f"{len(comparison.parts) - len(missing)} of {len(comparison.parts)} trainings are done already")
    comparison.out.mkdir(parents=True, exist_ok=True)
    with held(comparison.out):
        failures: Failures = {}
        if missing:
            schedule = partial(side_by_side, jobs=at_once) if at_once > 1 else one_by_one
            failures = schedule(missing, partial(_train, circumstances), Watch(missing, at_once, watchers))
        return gather(comparison, circumstances, failures), failures


def _train(circumstances: Circumstances, part: Part, progress: Report, say: Say) -> dict[str, Any]:
    for method in circumstances.guests:
        methods.register(method)
    return experiment.run(job_of(part, circumstances), progress=progress, say=say)


def number_of_jobs(jobs: int | None, device: str) -> int:
    """How many trainings run side by side."""
    if jobs is None:
        return 1 if torch.device(device).type != "cpu" else min(MOST_JOBS, cores())
    if jobs < 1:
        raise InvalidArgumentError(f"--jobs {jobs}; allowed: an int of at least 1")
    return jobs


def check_finished(comparison: Comparison, circumstances: Circumstances) -> None:
    """Refuse a folder whose finished trainings are of another comparison, before anything is trained."""
    for part in comparison.parts:
        if part.is_done and all(RunFolder(path).record.exists() for path in part.needs):
            _finished(part, circumstances)


def _finished(part: Part, circumstances: Circumstances) -> dict[str, Any]:
    """The record of a part that is done under these very settings."""
    try:
        record = experiment.finished(job_of(part, circumstances))
        assert record is not None
        stored = {key: record["settings"].get(key) for key in experiment.OF_THE_SIZES}
        ours = experiment.plain_settings(part.settings)
        check_same_run(part.folder.record, stored, {key: ours[key] for key in experiment.OF_THE_SIZES})
        return record
    except InvalidArgumentError as error:
        what = str(error).partition("; allowed:")[0]
        raise InvalidArgumentError(f"{what}; allowed: the same settings, or another folder") from error
    except RunError as error:
        what = str(error).partition(";")[0]
        raise RunError(f"{what}; remove {part.path} to train it again") from error


def _check_sendable(circumstances: Circumstances, jobs: int) -> None:
    sent: list[tuple[str, Any, str]] = [("the recipe", replace(circumstances, guests=()), "a function of a module")]
    sent += [(f"method {method.name}", method, "a class of a module") for method in circumstances.guests]
    for what, value, allowed in sent:
        try:
            pickle.dumps(value)
        except Exception as error:  # a function inside a function, a lambda …
            raise InvalidArgumentError(
                f"jobs={jobs}: {what} cannot be sent to another process; allowed: jobs=1, or {allowed}"
            ) from error


def gather(comparison: Comparison, circumstances: Circumstances, failures: Failures) -> dict[str, Any]:
    """Write the record of every method and seed that is complete, and the summary of all that is in the folder."""
    everything = _all_in_folder(comparison, circumstances)
    for name in everything.methods:
        for seed in everything.seeds:
            parts = [part for part in everything.parts if (part.method, part.seed) == (name, seed)]
            if parts and parts[0].training.folder and all(part.is_done for part in parts):
                _write_record(comparison, parts)
    content = {**summary(everything), "failed": failures}
    write_atomically(comparison.out / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return content


def _all_in_folder(comparison: Comparison, circumstances: Circumstances) -> Comparison:
    """With the methods and seeds of earlier commands, as far as their settings are the same."""
    found = {int(path.name) for name in methods.METHODS for path in _folders(comparison.out / name)}
    seeds = sorted({*comparison.seeds, *found})
    every = plan(comparison.recipe, comparison.settings, list(methods.METHODS), seeds, comparison.out)
    asked = {part.path for part in comparison.parts}
    kept = []
    for part in every.parts:
        if part.path in asked:
            kept.append(part)
        elif part.is_done and all(RunFolder(path).record.exists() for path in part.needs):
            with suppress(InvalidArgumentError, DecomposableError, OSError):
                _finished(part, circumstances)
                kept.append(part)
    names = {part.method for part in kept if part.is_done}
    return replace(
        every,
        parts=tuple(kept),
        methods=tuple(name for name in methods.METHODS if name in names),
        seeds=tuple(seed for seed in seeds if any(part.seed == seed and part.is_done for part in kept)),
    )


def _folders(path: Path) -> list[Path]:
    return [folder for folder in path.iterdir() if folder.name.isdigit()] if path.is_dir() else []


def _write_record(comparison: Comparison, parts: Sequence[Part]) -> None:
    """One record for the trainings of one method and seed."""
    found = {part.training.folder: part.folder.finished() or {} for part in parts}
    first = next(iter(found.values()))
    rows = [{**row, "training": folder} for folder, record in found.items() for row in record["sizes"]]
    record = {
        "recipe": comparison.recipe,
        "method": parts[0].method,
        "seed": parts[0].seed,
        "finished": max(record["finished"] for record in found.values()),
        "training_seconds": round(sum(record["training_seconds"] for record in found.values()), 1),
        "machine": first["machine"],
        "commit": first["commit"],
        "trainings": {
            folder: {key: record[key] for key in ("settings", "training_seconds", "steps", "finished", "commit")}
            for folder, record in found.items()
        },
        "sizes": rows,
    }
    path = comparison.out / parts[0].method / str(parts[0].seed) / "record.json"
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
