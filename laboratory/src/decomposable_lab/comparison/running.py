"""Train what is missing, go on with what was cut off, leave alone what is done; then gather the records."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decomposable import recipes
from decomposable.progress import Progress, Report, quiet, shown
from decomposable.training import experiment
from decomposable.training import methods as registered
from decomposable.training.loop import Say
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.locks import holding
from decomposable_edge.machine import usable_cpus
from decomposable_lab.comparison.parts import Circumstances, Comparison, TrainingJob, check_finished, job_of, prepare
from decomposable_lab.comparison.results import gather
from decomposable_lab.comparison.scheduling import Train, one_by_one, side_by_side
from decomposable_lab.comparison.sharding import Shard, held_alone
from decomposable_lab.comparison.watching import Failures, Watch, Watchers

ENGINES = ("local", "ray")
MOST_JOBS = 4  # side by side unless more are asked for: each takes the memory of a training


class PartsFailedError(DecomposableError):
    """Say that some trainings of a comparison failed."""

    def __init__(self, failures: Failures, total: int) -> None:
        name, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        others = "the others are done, and " if len(failures) < total else ""
        super().__init__(f"{name}{more}: {reason}; {others}the same command tries again")


def compare(
    recipe: str | recipes.Recipe,
    *,
    out: Path | str,
    methods: str | Sequence[str] = "all",
    seeds: Sequence[int] = (0,),
    data: Path | str | None = None,
    device: str = "auto",
    jobs: int | None = None,
    engine: str = "local",
    address: str | None = None,
    shard: str | None = None,
    checkpoint_seconds: float = 60.0,
    progress: Report | None = None,
    say: Say = quiet,
    **settings: Any,
) -> dict[str, Any]:
    """Train and measure several methods under one protocol, as `decomposable-lab compare` does.

    Args:
        recipe: a built-in name, ``"package.module:function"``, or the function itself.
        out: the folder of the comparison; what is done in it is not done again.
        methods: their names, or "all".
        seeds: each method is trained with each of them.
        data: where the data set is.
        device: "auto", "cpu", "cuda" …
        jobs: how many trainings run side by side; by default one on a GPU, and on a CPU one for each core, up to four.
            More than one needs ``if __name__ == "__main__":`` around the program, as all of multiprocessing does.
        engine: "local", or "ray": a Ray cluster, where `jobs` is the most at a time (docs/machines.md).
        address: of that cluster; by default one is started here.
        shard: "K/N", to train the K-th of N shares of the comparison, while others train theirs.
        checkpoint_seconds: from one checkpoint to the next.
        progress: called with a `Progress`, which is text, about what is under way; by default it is shown on a
            terminal. `decomposable.progress.quiet` shows nothing.
        say: called with a line for every training that is done.
        **settings: of the recipe, to be replaced, such as ``epochs=10``.

    Returns the content of ``comparison.json``: for every method its curves, mean and spread over the seeds. Where some
    trainings failed, `PartsFailedError` says which and why; the others are there.
    """
    how = How(jobs=jobs, engine=engine, address=address, shard=None if shard is None else Shard.parse(shard))
    comparison, circumstances = prepare(
        recipe,
        out=how.found_everywhere(Path(out)),
        names=methods,
        seeds=seeds,
        data=None if data is None else how.found_everywhere(Path(data)),
        device=device,
        checkpoint_seconds=checkpoint_seconds,
        overrides=settings,
    )
    with shown(progress) as report:
        watchers = Watchers(progress=report, say=say)
        parts = how.own(comparison.parts)
        content, failures = run(comparison, circumstances, watchers=watchers, how=how, parts=parts)
    if failures:
        raise PartsFailedError(failures, len(comparison.parts))
    return content


def run(
    comparison: Comparison,
    circumstances: Circumstances,
    *,
    watchers: Watchers,
    how: How,
    parts: Sequence[TrainingJob] | None = None,
) -> tuple[dict[str, Any], Failures]:
    """Train what is missing, then write every method's record and the summary; it comes back, and what failed.

    Of a shard, only its `parts` are trained; what is missing of the others is told.
    """
    check_finished(comparison, circumstances)
    own = comparison.parts if parts is None else parts
    missing = [part for part in own if not part.is_done]
    at_once = how.at_once(len(missing), circumstances.device)
    if how.sends(at_once):
        _check_sendable(circumstances, at_once)
    if missing:
        watchers.progress(Progress("", "checking recipe and data"))
        experiment.try_out(circumstances.task(comparison.settings), comparison.settings, circumstances.device)
    for needed, name in comparison.added.items():
        watchers.say(f"{needed} is trained as well: {name} starts from it")
    if len(missing) < len(own):
        watchers.say(f"{len(own) - len(missing)} of {len(own)} trainings are done already")
    comparison.out.mkdir(parents=True, exist_ok=True)
    with how.held(comparison.out):
        failures: Failures = {}
        if missing:
            watch = Watch(missing, at_once, watchers)
            failures = how.schedule(missing, partial(_train, circumstances), watch, at_once, circumstances.device)
        with holding(comparison.out / ".comparison.json.lock"):  # another shard may have ended just now
            return gather(comparison, circumstances, failures), failures


@dataclass(frozen=True, kw_only=True)
class How:
    """Say who trains: some processes here, or those of a Ray cluster; all trainings, or a shard of them."""

    jobs: int | None = None
    engine: str = "local"
    address: str | None = None  # of the cluster
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidArgumentError(f"--engine {self.engine}: unknown; allowed: {', '.join(ENGINES)}")
        if self.address is not None and self.engine != "ray":
            raise InvalidArgumentError(f"--address {self.address}: of a Ray cluster; allowed: with --engine ray")
        if self.jobs is not None and self.jobs < 1:
            raise InvalidArgumentError(f"--jobs {self.jobs}; allowed: an int of at least 1")

    def at_once(self, missing: int, device: str) -> int:
        """Return how many trainings run side by side, at most."""
        if self.engine == "ray":
            return missing if self.jobs is None else min(self.jobs, missing)
        return min(number_of_jobs(self.jobs, device), missing)

    def sends(self, at_once: int) -> bool:
        """Return whether trainings run in other processes than this one."""
        return at_once > 1 or (at_once > 0 and self.engine == "ray")

    def schedule(self, parts: Sequence[TrainingJob], train: Train, watch: Watch, at_once: int, device: str) -> Failures:
        """Train the parts; what failed comes back."""
        if self.engine == "ray":
            from decomposable_lab.comparison.on_ray import on_ray  # an extra

            on_gpu = torch.device(device).type == "cuda"
            return on_ray(parts, train, watch, jobs=at_once, address=self.address, on_gpu=on_gpu)
        return side_by_side(parts, train, watch, jobs=at_once) if at_once > 1 else one_by_one(parts, train, watch)

    def found_everywhere(self, path: Path) -> Path:
        """Return a path that means the same to processes that run in other folders."""
        return path.resolve() if self.engine == "ray" else path

    def own(self, parts: Sequence[TrainingJob], before: int = 0) -> Sequence[TrainingJob]:
        """Return the trainings of the shard, or all."""
        return parts if self.shard is None else self.shard.own(parts, before)

    def held(self, folder: Path) -> AbstractContextManager[None]:
        """Refuse to run in a folder beside another process, unless both have shards of one comparison."""
        return held_alone(folder) if self.shard is None else self.shard.held(folder)


def missing_names(comparison: Comparison, failures: Failures) -> list[str]:
    """Return the trainings that somebody else has yet to make."""
    return [part.name for part in comparison.parts if not part.is_done and part.name not in failures]


def what_is_missing(names: Sequence[str], shard: Shard | None) -> str | None:
    """Say in words what is missing; None if nothing is."""
    if not names:
        return None
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    whose = "" if shard is None else f", of other shards than {shard}"
    return f"missing{whose}: {len(names)} trainings ({listed})"


def _train(circumstances: Circumstances, part: TrainingJob, progress: Report, say: Say) -> dict[str, Any]:
    for method in circumstances.guests:
        registered.register(method)
    return experiment.run(job_of(part, circumstances), progress=progress, say=say)


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


def number_of_jobs(jobs: int | None, device: str) -> int:
    """Return how many trainings run side by side."""
    if jobs is None:
        return 1 if torch.device(device).type != "cpu" else min(MOST_JOBS, len(usable_cpus()))
    if jobs < 1:
        raise InvalidArgumentError(f"--jobs {jobs}; allowed: an int of at least 1")
    return jobs
