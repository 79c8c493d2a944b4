"""The processes of one run, as `torchrun` starts them: how they meet, and what one of them does for all.

    process 0   ── reads and writes the folder, prints, tests sizes at the end
    every one   ── has its part of every batch, of the decompositions, and of the tests on the way

A process alone is the first of one, and waits for nobody.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from decomposable.core.passes import Local, averaged
from decomposable.core.processes import ALONE, LostProcessError, OtherProcessError, Processes
from decomposable.data.base import generator_for
from decomposable.training.devices import seed_everything
from decomposable.training.divergence import DivergedError
from decomposable_edge.console import SaidElsewhere, is_first_process
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.interrupts import Interrupted

T = TypeVar("T")
_AS_LONG_AS_IT_TAKES = timedelta(days=365)
_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def joined(device: str) -> Iterator[tuple[Processes, str]]:
    """Yield the processes that were started together, and the device of this one.

    `torchrun` starts them, or any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR, or who has set up
    torch.distributed already.
    """
    was_set_up = dist.is_available() and dist.is_initialized()
    if not was_set_up and not was_launched():
        yield ALONE, device
        return
    name = own_device(device)
    if not was_set_up:
        dist.init_process_group("nccl" if torch.device(name).type == "cuda" else "gloo")
    with warnings.catch_warnings():
        if not was_set_up and int(os.environ["RANK"]) > 0:
            warnings.simplefilter("ignore")  # the first one has the same
        yield Processes.of(None, torch.device(name)), name
    if not was_set_up:
        dist.destroy_process_group()  # not after an error: it would wait for those that are gone


@contextmanager
def silent_but_one() -> Iterator[None]:
    """Let one process print why all have failed; a process that fails alone says which it is."""
    try:
        yield
    except (Interrupted, DivergedError) as error:  # that is so on all of them
        if not is_first_process():
            raise SaidElsewhere from error
        raise
    except DecomposableError as error:
        if isinstance(error, OtherProcessError) and not isinstance(error, LostProcessError):
            raise SaidElsewhere from error
        which = "" if is_first_process() else f"process {os.environ['RANK']}: "
        go_on = "; --resume goes on from the last checkpoint" if isinstance(error, LostProcessError) else ""
        if which or go_on:
            raise DecomposableError(f"{which}{error}{go_on}") from error
        raise


def was_launched() -> bool:
    """Return whether this is one of several processes that were started to train together."""
    told = all(os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return told and os.environ["WORLD_SIZE"] != "1" and dist.is_available()


def own_device(device: str) -> str:
    """Return the GPU of this process, if there are any and nothing else was asked for."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        allowed = "auto, cpu or cuda where several processes train"
        raise InvalidArgumentError.about("--device", device, allowed, f"--device {device}; allowed: {allowed}")
    here, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= count:
        why = f"--device {device}: process {here} of this machine has no GPU, there are {count}"
        allowed = f"--nproc-per-node of at most {count}, or --device cpu"
        raise InvalidArgumentError.about("--device", device, allowed, f"{why}; allowed: {allowed}")
    torch.cuda.set_device(here)
    return f"cuda:{here}"


def agreed(processes: Processes, work: Callable[[], T]) -> T:
    """Return the result of work that all do; if it fails on several for the same reason, only the first says so."""
    if processes.is_alone:
        return work()
    try:
        return processes.together(work)
    except Exception as error:
        texts = processes.texts(f"{type(error).__name__}: {error}")
        own = texts[processes.index]
        if own in texts[: processes.index]:
            raise OtherProcessError(f"process {texts.index(own)} of {processes.count} failed: {own}") from error
        raise


def average_gradients_(model: nn.Module, samples: int, processes: Processes) -> None:
    """Replace every `.grad` by its mean over all processes, by their samples."""
    if processes.is_alone:
        return
    trainable = [p for p in model.parameters() if p.requires_grad]
    nothing = torch.zeros((), device=processes.device)

    def local() -> Local:
        return Local(nothing, {p: p.grad for p in trainable}, samples)

    for parameter, mean in averaged(local, trainable, processes).gradient.items():
        parameter.grad = None if mean is None else mean.to(parameter.dtype)


def mean_values(values: Mapping[str, float], samples: int, processes: Processes) -> dict[str, float]:
    """Return the values of a step, averaged over all processes by their samples."""
    if processes.is_alone:
        return dict(values)
    own = [samples, *(samples * value for value in values.values())]
    _, (total, *sums) = processes.summed(lambda: (None, own), len(own))
    return {name: value / total for name, value in zip(values, sums, strict=True)}


def by_the_first(processes: Processes, stop: threading.Event, work: Callable[[], bytes]) -> bytes:
    """Return what the first process makes; the others wait for it, however long that takes, and get it, too."""
    if processes.is_alone:
        return work()
    # On the CPU, whatever the device: while they wait, no collective of a GPU is under way that could time out.
    group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    waiting, made = Processes(group, torch.device("cpu")), b""
    try:
        made = work() if processes.is_first else b""
    except BaseException:
        _send_size(waiting, -1, stop)
        raise
    size = _send_size(waiting, len(made), stop)
    if size < 0:
        raise OtherProcessError(f"process 0 of {processes.count} failed")
    content = torch.frombuffer(bytearray(made or bytes(size)), dtype=torch.uint8)
    waiting.send_([content], owner=0)
    return content.numpy().tobytes()


def from_the_first(processes: Processes, stop: threading.Event, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a dict that the first process makes, as JSON gives it back; a process alone gets it as it is."""
    if processes.is_alone:
        return work()
    found: dict[str, Any] = json.loads(by_the_first(processes, stop, lambda: json.dumps(work()).encode()))
    return found


def _send_size(waiting: Processes, size: int, stop: threading.Event) -> int:
    told = torch.tensor([size])
    sending = dist.broadcast(told, group=waiting.group, group_src=0, async_op=True)
    assert sending is not None
    while not sending.is_completed():  # and not .wait(), in which no signal would be seen
        if stop.is_set() and not waiting.is_first:
            raise Interrupted("stopped while the first process was measuring; --resume does that again")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    try:
        sending.wait()
    except RuntimeError as error:
        raise LostProcessError("process 0 cannot be reached, perhaps it was killed") from error
    return int(told)


@contextmanager
def file_of_the_first(path: Path, processes: Processes) -> Iterator[Path]:
    """Yield a file of the first process; the others, which may be on another machine, get a copy.

    The path does not exist if the first process has no such file.
    """
    if processes.is_alone:
        yield path
        return
    content = by_the_first(processes, threading.Event(), lambda: b"1" + path.read_bytes() if path.exists() else b"0")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if content[:1] == b"1" and not processes.is_first:
            copy.write_bytes(content[1:])
        yield path if processes.is_first else copy


def seed_own_(seed: int, processes: Processes) -> None:
    """Let every process but the first draw numbers of its own, once all have built the same network."""
    if not processes.is_first:
        seed_everything(int(generator_for(seed, "process", processes.index).initial_seed()) % 2**31)


def leave_process_group(network: nn.Module, processes: Processes) -> None:
    """Stop the synchronisation of batch normalisation: the first process goes on alone."""
    synchronised = [module for module in network.modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronised and not processes.is_alone:
        groups = [dist.new_group([rank]) for rank in range(processes.count)]
        for module in synchronised:
            module.process_group = groups[processes.index]
