"""What `torch.save` wrote, read without unpickling it, and without memory for what a file merely claims to hold.

A file of today is a zip archive: a pickle, and the bytes of every storage as an entry of its own, none of them
compressed. One from before PyTorch 1.6 is five pickles, and the storages behind them. The pickles are read by the
machine of `pickling.py`, which calls nothing; a tensor in them is a claim on a part of a storage, whose bytes are read
when somebody asks for it. So a file takes at most twice its own size, besides what some million small values take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from decomposable.data.pickling import Machine, Refused, Token, in_brief, shown
from decomposable.training.torch_zip import entries_of, read_entry

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MAGIC = 0x1950A86A20F9469CFC6C  # at the head of an old file
_PROTOCOL = 1001
_MOST_AXES = 64
_MOST_STORAGE = 1 << 48


@dataclass(frozen=True)
class Storage:
    """The bytes of one or more tensors, by their name in the file."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A tensor that the file says it has: a part of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensors(file: _ZipFile | _OldFile, claims: Mapping[str, Claim]) -> dict[str, Tensor]:
    """These tensors of a file; those that share a storage there share it here."""
    with _in_one_line():
        contents = {each: file.storage(each) for each in dict.fromkeys(claim.storage for claim in claims.values())}
        return {
            name: contents[claim.storage].view(claim.dtype).as_strided(claim.shape, claim.strides, claim.offset)
            for name, claim in claims.items()
        }


@contextmanager
def open_torch_file(path: Path) -> Iterator[_ZipFile | _OldFile]:
    """A file whose `content` is what it holds, with a `Claim` in place of every tensor.

    Raises `ValueError` in one line where it is damaged, or holds more than tensors and values.
    """
    with path.open("rb") as stream:
        with _in_one_line():
            is_zip = stream.read(2) == b"PK"
            stream.seek(0)
            file = _ZipFile(stream) if is_zip else _OldFile(stream.read())
        yield file


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Refused as refused:
        raise ValueError(f"it holds {refused}; allowed: tensors and plain values") from None
    except Exception as error:  # on noise, readers fail in any way there is
        raise ValueError(f"it is damaged, or no file of torch.save ({in_brief(error)})") from error


class _ZipFile:
    """As `torch.save` writes it now."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._entries = stream, entries_of(stream)
        tops = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(tops) != 1 or any(name.startswith(f"{tops[0][:-8]}code/") for name in self._entries):
            raise Refused("no pickle data.pkl, or a program (TorchScript)")
        self._folder = tops[0].removesuffix("data.pkl")
        order = self._entries.get(f"{self._folder}byteorder")
        if order is not None and read_entry(stream, order).numpy().tobytes() != b"little":
            raise Refused("numbers in another order of bytes")
        pickled = read_entry(stream, self._entries[tops[0]]).numpy().tobytes()
        self.content, end = _Tensors(len(pickled)).run(pickled)
        if end != len(pickled):
            raise Refused("bytes after the end of the pickle")

    def storage(self, storage: Storage) -> Tensor:
        """The entry of this name, which has to be just as long."""
        entry = self._entries.get(f"{self._folder}data/{storage.key}")
        nbytes = storage.numel * storage.dtype.itemsize
        if entry is None or entry.size != nbytes:
            there = "none" if entry is None else f"{entry.size:,}"
            raise Refused(f"a storage {storage.key[:40]!r} of {nbytes:,} bytes, of which there are {there}")
        return read_entry(self._stream, entry)


class _OldFile:
    """As `torch.save` wrote it before PyTorch 1.6."""

    def __init__(self, content: bytes) -> None:
        magic, place = Machine(len(content)).run(content)
        protocol, place = Machine(len(content)).run(content, place)
        if (magic, protocol) != (_MAGIC, _PROTOCOL):
            raise ValueError("no file of torch.save")
        _, place = Machine(len(content)).run(content, place)  # the machine it was written on
        machine = _Tensors(len(content))
        self.content, place = machine.run(content, place)
        keys, place = Machine(len(content)).run(content, place)
        if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(machine.storages):
            raise ValueError("its storages are not those of its tensors")
        self._places: dict[Storage, memoryview] = {}
        for key in keys:
            storage = machine.storages[key]
            end = place + 8 + storage.numel * storage.dtype.itemsize
            if end > len(content) or int.from_bytes(content[place : place + 8], "little") != storage.numel:
                raise ValueError("a storage is not as long as it says")
            self._places[storage] = memoryview(content)[place + 8 : end]
            place = end
        if place != len(content):
            raise ValueError("bytes after the last storage")

    def storage(self, storage: Storage) -> Tensor:
        """A copy of its part of the file."""
        content = torch.empty(len(self._places[storage]), dtype=torch.uint8)
        content.numpy()[:] = self._places[storage]
        return content


class _Tensors(Machine):
    """Knows tensors, parameters and the dicts that they are kept in."""

    admitted = frozenset(
        {("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device"), ("_codecs", "encode")}
        | {("torch._utils", f"_rebuild_{name}") for name in ("tensor", "tensor_v2", "tensor_v3", "parameter")}
        | {(module, name) for module in ("torch", "torch.storage", "torch.cuda") for name in _STORAGES}
        | {("torch", name) for name in _DTYPES}
    )

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.storages: dict[str, Storage] = {}

    def key(self, key: Any) -> Any:
        """An optimiser counts its parameters."""
        return key if type(key) is int and abs(key) < 1 << 63 else super().key(key)

    def persistent(self, identity: Any) -> Storage:
        """A storage; old files have a place for a part of one, which is not used."""
        match identity:
            case ("storage", Token(name=kind), str(key), str(), int(numel), *rest) if rest in ([], [None]):
                storage = Storage(key, _STORAGES[kind], numel)
                if 0 <= numel < _MOST_STORAGE and self.storages.setdefault(key, storage) == storage:
                    return storage
        raise Refused(f"a storage {shown(identity)}")

    def reduce(self, token: Token, arguments: Any) -> Any:
        """A tensor as a claim, an empty dict, or a value that is of no concern here."""
        match token.name, arguments:
            case "OrderedDict", ():
                return {}
            case "_rebuild_tensor", (Storage() as storage, int(offset), tuple(shape), tuple(strides)):
                return _claim(storage, storage.dtype, offset, shape, strides)
            case "_rebuild_tensor_v2", (
                Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), {}, *rest
            ) if not any(rest):  # else: the numbers stand for their conjugates  # fmt: skip
                return _claim(storage, storage.dtype, offset, shape, strides)
            case "_rebuild_tensor_v3", (
                Storage() as storage, int(offset), tuple(shape), tuple(strides), bool(), {}, Token(name=name), *rest
            ) if name in _DTYPES and not any(rest):  # fmt: skip
                return _claim(storage, _DTYPES[name], offset, shape, strides)
            case "_rebuild_parameter", (Claim() as data, bool(), {}):
                return data
            case "Size", (tuple(sizes),):
                return sizes
            case "device", (str(kind), *_):
                return kind
            case "encode", (str(text), "latin1" | "latin-1"):
                return self.encode(text)
        return super().reduce(token, arguments)

    def build(self, target: Any, state: Any) -> None:
        """What a state dict says of the versions of its modules."""
        if not isinstance(target, dict) or not isinstance(state, dict):
            super().build(target, state)


def _claim(
    storage: Storage, dtype: torch.dtype, offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...]
) -> Claim:
    """A tensor whose numbers are all there: none of them is claimed twice, and none lies outside of the storage."""
    numbers = (offset, *shape, *strides)
    if len(shape) == len(strides) <= _MOST_AXES and all(type(n) is int and 0 <= n < _MOST_STORAGE for n in numbers):
        held = storage.numel * storage.dtype.itemsize // dtype.itemsize
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 in shape or (last < held and math.prod(shape) <= held):
            return Claim(storage=storage, dtype=dtype, offset=offset, shape=shape, strides=strides)
    raise Refused(f"a tensor of shape {shown(shape)} and strides {shown(strides)} in {storage.numel:,} numbers")
