"""Train what is missing, go on with what was cut off, leave alone what is done; then gather the records."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decomposable import methods as registered
from decomposable import recipes
from decomposable.comparison.parts import Circumstances, Comparison, Part, check_finished, job_of, prepare
from decomposable.comparison.results import gather
from decomposable.comparison.scheduling import cores, one_by_one, side_by_side
from decomposable.comparison.watching import Failures, Watch, Watchers
from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.progress import Progress, Report, quiet, shown
from decomposable.training import experiment
from decomposable.training.loop import Say
from decomposable.training.runs import held

MOST_JOBS = 4  # side by side unless more are asked for: each takes the memory of a training


class PartsFailedError(DecomposableError):
    """Some trainings of a comparison failed."""

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


def run(
    comparison: Comparison, circumstances: Circumstances, *, jobs: int | None, watchers: Watchers
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
    """How many trainings run side by side."""
    if jobs is None:
        return 1 if torch.device(device).type != "cpu" else min(MOST_JOBS, cores())
    if jobs < 1:
        raise InvalidArgumentError(f"--jobs {jobs}; allowed: an int of at least 1")
    return jobs
