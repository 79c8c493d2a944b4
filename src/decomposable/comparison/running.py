"""Train what is missing, go on with what was cut off, leave alone what is done; then gather the records."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decomposable import artifact, experiment, methods, recipes
from decomposable.comparison.parts import Comparison, Part, plan
from decomposable.comparison.results import summary
from decomposable.devices import choose_device
from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.files import write_atomically
from decomposable.interrupts import Interrupted, stop_signals
from decomposable.runs import RunFolder
from decomposable.settings import Settings, with_overrides
from decomposable.training import Say, as_duration

MOST_JOBS = 4  # side by side unless more are asked for: each takes the memory of a training
_SECONDS_BETWEEN_LINES = 0.5


class PartsFailedError(DecomposableError):
    """Some trainings of a comparison failed; the others are done."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What all trainings of a comparison share."""

    recipe: str | recipes.Recipe
    data: Path | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 60.0
    command: str = ""


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
    progress: Say = lambda text: None,
    say: Say = lambda text: None,
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
        checkpoint_seconds: from one checkpoint to the next.
        progress: called with a line about what is under way.
        say: called with a line for every training that is done.
        **settings: of the recipe, to be replaced, such as ``epochs=10``.

    Returns the content of ``comparison.json``: for every method its curves, mean and spread over the seeds.
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
    return run(comparison, circumstances, jobs=jobs, progress=progress, say=say)


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
    chosen = with_overrides(settings or recipes.default_settings(function), overrides or {})
    recipes.make_task(function, data, chosen)
    if out.exists() and not out.is_dir():
        raise InvalidArgumentError(f"--out {out}: it is a file; allowed: a folder")
    wanted = [names] if isinstance(names, str) else list(names)
    comparison = plan(name, chosen, list(methods.METHODS) if wanted == ["all"] else wanted, seeds, out)
    circumstances = Circumstances(
        recipe=recipe,
        data=data,
        device=choose_device(device),
        checkpoint_seconds=checkpoint_seconds,
        command=command,
    )
    return comparison, circumstances


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
    progress: Say = lambda text: None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Train what is missing, then write every method's record and the summary, which comes back."""
    for needed, name in comparison.added.items():
        say(f"{needed} is trained as well: {name} starts from it")
    count = number_of_jobs(jobs, circumstances.device)
    missing = [part for part in comparison.parts if not part.is_done]
    check_finished(comparison, circumstances)
    done = len(comparison.parts) - len(missing)
    if done:
        say(f"{done} of {len(comparison.parts)} trainings are done already")
    failures: dict[str, str] = {}
    if missing:
        at_once = min(count, len(missing))
        schedule = _one_by_one if at_once == 1 else _side_by_side
        failures = schedule(missing, circumstances, at_once, progress, say)
    content = gather(comparison)
    if failures:
        name, reason = next(iter(failures.items()))
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise PartsFailedError(f"{name}{more}: {reason}; the others are done, and the same command tries again")
    return content


def number_of_jobs(jobs: int | None, device: str) -> int:
    """How many trainings run side by side."""
    if jobs is None:
        return 1 if torch.device(device).type != "cpu" else min(MOST_JOBS, os.cpu_count() or 1)
    if jobs < 1:
        raise InvalidArgumentError(f"--jobs {jobs}; allowed: an int of at least 1")
    return jobs


def check_finished(comparison: Comparison, circumstances: Circumstances) -> None:
    """Refuse a folder whose finished trainings are of another comparison, before anything is trained."""
    for part in comparison.parts:
        if part.is_done and all(RunFolder(path).record.exists() for path in part.needs):
            experiment.finished(job_of(part, circumstances))


def _one_by_one(
    parts: Sequence[Part], circumstances: Circumstances, jobs: int, progress: Say, say: Say
) -> dict[str, str]:
    """In this process, one after the other; what failed comes back, with the reason."""
    failures: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        if _lacks_something(part, failures):
            continue
        title = f"{part.name} ({number} of {len(parts)})"
        try:
            record = experiment.run(job_of(part, circumstances), progress=_titled(title, progress))
            say(_line(part, record, number, len(parts)))
        except Interrupted:
            raise
        except (DecomposableError, OSError) as error:
            failures[part.name] = str(error)
            say(f"{part.name} failed: {error}")
    return failures


def _titled(title: str, progress: Say) -> Say:
    return lambda text: progress(f"{title}: {text}")


def _lacks_something(part: Part, failures: dict[str, str]) -> bool:
    """Whether what it starts from has failed; then it has, too."""
    absent = [path for path in part.needs if not RunFolder(path).record.exists()]
    if absent:
        failures[part.name] = f"{'/'.join(absent[0].parts[-2:])}, which it starts from, is not there"
    return bool(absent)


def _line(part: Part, record: Mapping[str, Any], number: int, count: int) -> str:
    """What came out of one training: the best accuracy, and what it took."""
    rows = record["sizes"]
    best = max((row["accuracy"] for row in rows), default=float("nan"))
    sizes = f"{len(rows)} sizes" if len(rows) > 1 else f"{rows[0]['macs_fraction']:.3f} of the MACs" if rows else ""
    seconds = as_duration(record["training_seconds"])
    return f"[{number}/{count}] {part.name}: {sizes}, up to {best:.2f}% ({seconds} of training)"


def _side_by_side(
    parts: Sequence[Part], circumstances: Circumstances, jobs: int, progress: Say, say: Say
) -> dict[str, str]:
    """Some at a time, each in a process with its share of the cores."""
    try:
        pickle.dumps(circumstances)
    except Exception as error:  # a function inside a function, a lambda …
        raise InvalidArgumentError(
            f"jobs={jobs}: the recipe cannot be sent to another process; allowed: jobs=1, or a function of a module"
        ) from error
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    failures: dict[str, str] = {}
    waiting, count = list(parts), 0
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with stop_signals() as stop, context.Manager() as manager:
        lines: Any = manager.Queue()
        told = _Telling(lines, len(parts), progress)
        with ProcessPoolExecutor(
            jobs, mp_context=context, initializer=_begin, initargs=(os.getpid(), threads, lines)
        ) as pool:
            running: dict[Future[dict[str, Any]], Part] = {}
            while (waiting and not stop.is_set()) or running:
                while (
                    len(running) < jobs and not stop.is_set() and (part := _next(waiting, running.values(), failures))
                ):
                    running[pool.submit(_work, part, circumstances)] = part
                if not running:
                    break
                finished, _ = wait(running, timeout=_SECONDS_BETWEEN_LINES, return_when=FIRST_COMPLETED)
                told.show(count)
                if stop.is_set():
                    _ask_to_stop(pool)
                for future in finished:
                    part, count = running.pop(future), count + 1
                    told.forget(part.name)
                    reason = _outcome(future)
                    if reason is None:
                        say(_line(part, future.result(), count, len(parts)))
                    elif not stop.is_set():
                        failures[part.name] = reason
                        say(f"{part.name} failed: {reason}")
        if stop.is_set():
            left = len(parts) - count
            raise Interrupted(f"stopped with {left} of {len(parts)} trainings to go; the same command goes on")
    return failures


def _next(waiting: list[Part], running: Any, failures: dict[str, str]) -> Part | None:
    """The first part that has what it needs; it is taken off the list."""
    to_come = {part.path for part in (*waiting, *running)}
    for part in list(waiting):
        if any(path in to_come for path in part.needs):
            continue
        waiting.remove(part)
        if not _lacks_something(part, failures):
            return part
    return None


def _outcome(future: Future[dict[str, Any]]) -> str | None:
    """Why it failed; None where it did not."""
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, BrokenProcessPool):
        return "its process was killed, perhaps for want of memory"
    if isinstance(error, DecomposableError | OSError):
        return str(error)
    raise error


class _Telling:
    """The last line of every training that is under way, put together."""

    def __init__(self, lines: Any, total: int, progress: Say) -> None:
        self.lines, self.total, self.progress = lines, total, progress
        self._last: dict[str, str] = {}

    def show(self, count: int) -> None:
        """Read what has come, and show it."""
        while True:
            try:
                name, text = self.lines.get_nowait()
            except queue.Empty:
                break
            self._last[name] = text
        under_way = "  |  ".join(f"{name} {text}" for name, text in self._last.items())
        self.progress(f"comparing: {count} of {self.total} done  |  {under_way}")

    def forget(self, name: str) -> None:
        """It is done."""
        self._last.pop(name, None)


_LINES: Any = None  # of a worker process: where its lines go


def _begin(parent: int, threads: int, lines: Any) -> None:
    """Of a worker process: its share of the cores; signals come from the parent, and without a parent it stops."""
    global _LINES
    _LINES = lines
    torch.set_num_threads(threads)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # else Ctrl-C would reach it twice: from the terminal and from the parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _work(part: Part, circumstances: Circumstances) -> dict[str, Any]:
    """Of a worker process: one training."""
    return experiment.run(job_of(part, circumstances), progress=_now_and_then(part.name))


def _now_and_then(name: str) -> Callable[[str], None]:
    last = 0.0

    def report(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            _LINES.put((name, text.removeprefix("training: ")))

    return report


def _ask_to_stop(pool: ProcessPoolExecutor) -> None:
    """Each training under way then writes its checkpoint and ends. Asked once: a second time would stop it at once."""
    processes = getattr(pool, "_processes", None) or {}
    for process in processes.values():
        if not getattr(process, "was_asked_to_stop", False):
            process.was_asked_to_stop = True
            process.terminate()


def gather(comparison: Comparison) -> dict[str, Any]:
    """Write the record of every method and seed that is complete, and the summary of all, which comes back."""
    for name in (*comparison.methods, *comparison.added):
        for seed in comparison.seeds:
            parts = [part for part in comparison.parts if (part.method, part.seed) == (name, seed)]
            if len(parts) > 1 or parts[0].training.folder:
                _write_record(comparison, parts)
    content = summary(comparison)
    write_atomically(comparison.out / "comparison.json", (json.dumps(content, indent=1) + "\n").encode())
    return content


def _write_record(comparison: Comparison, parts: Sequence[Part]) -> None:
    """One record for the trainings of one method and seed, where all of them are done."""
    if not all(part.is_done for part in parts):
        return
    found = {part.training.folder: part.folder.finished() or {} for part in parts}
    first = parts[0]
    rows = [{**row, "training": folder} for folder, record in found.items() for row in record["sizes"]]
    record = {
        "recipe": comparison.recipe,
        "method": first.method,
        "seed": first.seed,
        "finished": max(record["finished"] for record in found.values()),
        "training_seconds": round(sum(record["training_seconds"] for record in found.values()), 1),
        "machine": next(iter(found.values()))["machine"],
        "commit": next(iter(found.values()))["commit"],
        "trainings": {
            folder: {key: record[key] for key in ("settings", "training_seconds", "steps", "finished", "commit")}
            for folder, record in found.items()
        },
        "sizes": rows,
    }
    path = comparison.out / first.method / str(first.seed) / "record.json"
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
