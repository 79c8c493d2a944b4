"""The processes that train one model together: what they tell each other, in a few words.

    together(work)     work that may raise on one process alone; then it raises on all of them, and none waits for it
    anywhere(flags)    what is true on any process is true on all
    from_first(...)    numbers, or tensors, as the first process has them
    mean(gradient)     Σ_p n_p g_p / Σ_p n_p, in buckets, under way while other work is done

Every process has to make the same calls in the same order. A process alone makes none: all of this costs it nothing.
A process that died is noticed by the next call, which says so in place of the words of the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decomposable.core.gradients import Gradient
from decomposable_edge.errors import DecomposableError, InvalidArgumentError, NonFiniteError
from decomposable_edge.text import first_line

BUCKET_BYTES = 25 * 2**20
"""Tensors go together until they are so many: large enough for the wire, small enough to be on their way early."""

_TEXT_BYTES = 400  # of why a process failed, told to the others
_KINDS: tuple[type[Exception], ...] = (torch.linalg.LinAlgError, NonFiniteError, Exception)
"""What may be raised, the worst last: the same on all processes, where they can do something about it."""

T = TypeVar("T")
SomeTensor = TypeVar("SomeTensor", bound=Tensor)


class OtherProcessError(DecomposableError):
    """Another process that trains the same model has failed, or is gone."""


class LostProcessError(OtherProcessError):
    """Another process cannot be reached: it says no more why."""


class Processes:
    """Talk to the other processes of a group; `index` is this one's place among `count`."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.index = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)
        self.is_alone, self.is_first = group is None, self.index == 0  # the first writes and speaks for all

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> Processes:
        """Return the processes of a group, by default all; without torch.distributed, this process alone."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            why = "this process is not in it"
            raise InvalidArgumentError.about("process_group", None, "a group that it is in", why=why)
        return cls(group if group is not None and dist.get_world_size(group) > 1 else None, device)

    def together(self, work: Callable[[], T]) -> T:
        """Return what the work returns here, once it is done on every process; raise where it failed on any."""
        result, _ = self.summed(lambda: (work(), ()), 0)
        return result

    def summed(self, work: Callable[[], tuple[T, Sequence[float]]], length: int) -> tuple[T, list[float]]:
        """Do the same for work that also gives so many numbers, and return their sums over all processes, too."""
        if self.is_alone:
            result, numbers = work()
            return result, list(numbers)
        error: Exception | None = None
        told = torch.zeros(len(_KINDS) + length, dtype=torch.float64)
        try:
            result, numbers = work()
            told[len(_KINDS) :] = torch.tensor(numbers, dtype=torch.float64)
        except Exception as raised:  # whatever a model or a loss raises: the others must not wait for it
            error = raised
            told[_kind_of(raised)] = 1
        sums = self._reduced(told).tolist()
        worst = max((kind for kind in range(len(_KINDS)) if sums[kind]), default=None)
        if worst is not None:
            self._raise(worst, error)
        return result, sums[len(_KINDS) :]

    def _raise(self, worst: int, own: Exception | None) -> NoReturn:
        """Raise what is the worst that happened anywhere, on each process; its own where that is as bad."""
        is_any = worst == len(_KINDS) - 1
        if own is not None and _kind_of(own) == worst:
            self.texts(f"{type(own).__name__}: {first_line(own)}" if is_any else str(own))
            raise own
        index, text = next((i, text) for i, text in enumerate(self.texts("")) if text)
        raise OtherProcessError(f"process {index} of {self.count} failed: {text}") if is_any else _KINDS[worst](text)

    def texts(self, text: str) -> list[str]:
        """Return a short text of every process."""
        return [part.decode(errors="replace") for part in self.gathered(text.encode()[:_TEXT_BYTES])]

    def gathered(self, content: bytes) -> list[bytes]:
        """Return some bytes of every process."""
        if self.is_alone:
            return [content]
        lengths = self._gathered(torch.tensor([len(content)])).flatten().tolist()
        padded = bytearray(content.ljust(max(1, *lengths), b"\0"))
        found = self._gathered(torch.frombuffer(padded, dtype=torch.uint8)).cpu().numpy()
        return [row.tobytes()[:length] for row, length in zip(found, lengths, strict=True)]

    def _gathered(self, tensor: Tensor) -> Tensor:
        own = tensor.to(self.device)
        found = [torch.empty_like(own) for _ in range(self.count)]
        with _naming_the_dead():
            dist.all_gather(found, own, group=self.group)
        return torch.stack(found)

    def _reduced(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        told = tensor.to(self.device)
        with _naming_the_dead():
            dist.all_reduce(told, how, group=self.group)
        return told

    def anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """Return each as it is on any process."""
        if self.is_alone:
            return list(flags)
        return self._reduced(torch.tensor(flags, dtype=torch.int32), dist.ReduceOp.MAX).bool().tolist()

    def from_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the first process's, with all their bits."""
        told = torch.tensor(numbers, dtype=torch.float64).to(self.device)
        self.send_([told], owner=0)
        return told.tolist()

    def send_(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Overwrite tensors with those of the process that owns them."""
        if self.is_alone:
            return
        for part in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in part])
            with _naming_the_dead():
                dist.broadcast(flat, group=self.group, group_src=owner)
            if owner != self.index:
                for tensor, values in zip(part, _split(flat, part), strict=True):
                    tensor.copy_(values.view(tensor.shape))

    def mean(self, gradient: Gradient, share: float, is_used: Sequence[bool]) -> Averaging:
        """Begin to sum `share` times the gradient over all processes; `is_used` says which any of them has."""
        if self.is_alone:
            return Averaging(gradient, ())
        result: dict[nn.Parameter, Tensor | None] = dict.fromkeys(gradient)
        under_way = []
        for part in _buckets([p for p, is_it in zip(gradient, is_used, strict=True) if is_it]):
            # Of half precision, sums are of float32: a share of a small number would vanish.
            kind = torch.promote_types(part[0].dtype, torch.float32)
            bucket = part[0].new_zeros(sum(p.numel() for p in part), dtype=kind)
            for parameter, values in zip(part, _split(bucket, part), strict=True):
                summed, own = _as_laid_out(values, parameter), gradient[parameter]
                if own is not None and share:
                    summed.add_(own, alpha=share)
                result[parameter] = summed
            with _naming_the_dead():
                under_way.append(dist.all_reduce(bucket, group=self.group, async_op=True))
        return Averaging(result, under_way)

    def check_same_(self, named: Iterable[tuple[str, Tensor]], generator: torch.Generator) -> None:
        """Refuse weights that differ between processes, and take the first one's generator."""
        if self.is_alone:
            return
        names, tensors = zip(*named, strict=True)
        prints = torch.stack([torch.tensor(len(names), device=self.device), *map(_bits, tensors)])
        for told in (prints[:1], prints):  # first how many there are: else the rest does not fit
            # The largest, and (of the complement) the smallest anywhere.
            most = self._reduced(torch.stack([told, ~told]), dist.ReduceOp.MAX)
            different = (most[0] != ~most[1]).nonzero().flatten().tolist()
            if different:
                place = different[0] - 1
                what = f"parameter '{names[place]}' is" if place >= 0 else "the models are"
                raise InvalidArgumentError(
                    f"model: {what} not the same on all {self.count} processes; allowed: the same weights everywhere, "
                    "by one seed, or as DistributedDataParallel(model) makes them"
                )
        state = generator.get_state().to(self.device)
        self.send_([state], owner=0)
        generator.set_state(state.cpu())


class Averaging:
    """Hold a gradient on its way to its mean over all processes."""

    def __init__(self, gradient: Gradient, under_way: Sequence[Any]) -> None:
        self._gradient, self._under_way = gradient, under_way

    def wait(self) -> Gradient:
        """Return the mean, when it is there."""
        with _naming_the_dead():
            for work in self._under_way:
                work.wait()
        self._under_way = ()
        return self._gradient


ALONE = Processes(None, torch.device("cpu"))


def same_buffers_(model: nn.Module, processes: Processes) -> None:
    """Give every process the first one's buffers, as DistributedDataParallel does before a pass."""
    processes.send_([*model.buffers()], owner=0)


def _kind_of(error: Exception) -> int:
    return next(i for i, kind in enumerate(_KINDS) if isinstance(error, kind))


def _buckets(tensors: Sequence[SomeTensor]) -> Iterator[list[SomeTensor]]:
    """Yield the tensors in order, those of one type and device together, up to the size of a bucket."""
    groups: dict[Any, list[SomeTensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        part: list[SomeTensor] = []
        size = 0
        for tensor in group:
            part.append(tensor)
            size += tensor.nbytes
            if size >= BUCKET_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return flat.split([tensor.numel() for tensor in tensors])


def _as_laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Return the flat values in the shape of a parameter, and in its layout where that leaves no gaps."""
    if like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last):
        return values.as_strided(like.shape, like.stride(), values.storage_offset())
    return values.view(like.shape)


def _bits(tensor: Tensor) -> Tensor:
    """Return a whole number that changes with any bit of a tensor, and is the same on every kind of machine."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    whole = plain.view(kinds[plain.element_size()]).flatten().long()
    return (whole * (torch.arange(len(whole), device=whole.device) % 8191 + 1)).sum() + len(whole)


@contextmanager
def _naming_the_dead() -> Iterator[None]:
    """Say of what a backend's sockets raise what it mostly is: a process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            f"the other processes cannot be reached, perhaps one of them was killed ({first_line(error)[:200]})"
        ) from error
