"""The processes of one run, as `torchrun` starts them: how they meet, and what one of them does for all.

    process 0   ── reads and writes the folder, speaks, tests sizes at the end
    every one   ── has its part of every batch, of the decompositions, and of the tests on the way

One alone is the first of one, and waits for nobody.
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
    """The processes that were started together, and the device of this one.

    Those of `torchrun`, or of any launcher that sets RANK, WORLD_SIZE and MASTER_ADDR; where torch.distributed is set
    up already, those.
    """
    if dist.is_available() and dist.is_initialized():
        name = own_device(device)
        yield Processes.of(None, torch.device(name)), name
        return
    if not was_launched():
        yield ALONE, device
        return
    name = own_device(device)
    on_gpu = torch.device(name).type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    with warnings.catch_warnings():
        if int(os.environ["RANK"]) > 0:
            warnings.simplefilter("ignore")  # the first one has the same
        yield Processes.of(None, torch.device(name)), name
    dist.destroy_process_group()  # not after an error: it would wait for those that are gone


@contextmanager
def silent_but_one() -> Iterator[None]:
    """Of processes that fail together one says why; of others, one whose own failure it is says which it is."""
    try:
        yield
    except (Interrupted, DivergedError) as error:  # all of them are, or have
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
    """Whether this is one of several processes that were started to train together."""
    told = all(os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return told and os.environ["WORLD_SIZE"] != "1" and dist.is_available()


def own_device(device: str) -> str:
    """The GPU of this process, where there are any and nothing else is asked for."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if device not in ("auto", "cuda"):
        raise InvalidArgumentError(f"--device {device}: with several processes; allowed: auto, cpu, cuda")
    here, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if here >= count:
        raise InvalidArgumentError(
            f"--device {device}: process {here} of this machine has no GPU, there are {count}; allowed: "
            f"--nproc-per-node of at most {count}, or --device cpu"
        )
    torch.cuda.set_device(here)
    return f"cuda:{here}"


def agreed(processes: Processes, work: Callable[[], T]) -> T:
    """What work returns that all do; where it fails on several for the same reason, only the first of them says so."""
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
    """What was seen in a step, averaged over all processes by their samples."""
    if processes.is_alone:
        return dict(values)
    own = [samples, *(samples * value for value in values.values())]
    _, (total, *sums) = processes.summed(lambda: (None, own), len(own))
    return {name: value / total for name, value in zip(values, sums, strict=True)}


def by_the_first(processes: Processes, stop: threading.Event, work: Callable[[], bytes]) -> bytes:
    """What the first process makes; the others wait for it, however long that takes, and get it, too."""
    if processes.is_alone:
        return work()
    # On the CPU, whatever the device: while they wait, no collective of a GPU is under way that could time out.
    group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
    waiting = Processes(group, torch.device("cpu"))
    if processes.is_first:
        try:
            made = work()
        except BaseException:
            _send_size(waiting, -1, stop)
            raise
        _send_size(waiting, len(made), stop)
        return _sent(waiting, made, len(made))
    size = _send_size(waiting, 0, stop)
    if size < 0:
        raise OtherProcessError(f"process 0 of {processes.count} failed")
    return _sent(waiting, b"", size)


def from_the_first(processes: Processes, stop: threading.Event, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The same for what JSON holds; a process alone has it as it is."""
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


def _sent(waiting: Processes, content: bytes, size: int) -> bytes:
    told = torch.zeros(size, dtype=torch.uint8)
    if waiting.is_first:
        told.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    waiting.send_([told], owner=0)
    return bytes(told.numpy().tobytes())


@contextmanager
def file_of_the_first(path: Path, processes: Processes) -> Iterator[Path]:
    """A file that the first process can read: itself there, a copy on the others, which may be on another machine.

    The path does not exist where the first one has no such file.
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
    """Have every process but the first draw numbers of its own: all have built the same network by now."""
    if not processes.is_first:
        seed_everything(int(generator_for(seed, "process", processes.index).initial_seed()) % 2**31)


def leave_process_group(network: nn.Module, processes: Processes) -> None:
    """Have synchronised batch normalisation ask nobody from now on: the first process goes on alone."""
    synchronised = [module for module in network.modules() if isinstance(module, nn.SyncBatchNorm)]
    if synchronised and not processes.is_alone:
        groups = [dist.new_group([rank]) for rank in range(processes.count)]
        for module in synchronised:
            module.process_group = groups[processes.index]
