"""Which device computes, and what its results depend on: versions, threads, and the global generators."""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decomposable_edge.errors import InvalidArgumentError


def choose_device(name: str) -> str:
    """The device by its name; "auto" is the CUDA GPU where there is one, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:  # each backend fails in a way of its own
        reason = (str(error).splitlines() or [""])[0][:100]
        raise InvalidArgumentError(
            f"--device {name}: it cannot be used here ({reason}); allowed: auto, cpu, cuda, cuda:1 …"
        ) from error
    return name


def make_deterministic() -> None:
    """Have cuDNN choose the same algorithms every time, so that a resumed run repeats; a CPU does so anyway."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGEST_KEPT = 32 << 20  # bytes: the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Have the C library keep the memory of tensors that are gone, up to 32 MiB each, for the next ones.

    By default glibc gives such blocks back at once, and the kernel fills every page of the next one with zeros: a fifth
    of a small network's step on a CPU (benchmarks/memory.py). Other C libraries are left alone.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, -1)  # taken as unsigned, the largest: never


def bits_depend_on(device: str, processes: int = 1) -> dict[str, Any]:
    """What may change the last bits of a computation."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "processes": processes,
        "PyTorch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if on_gpu else torch.device(device).type,
        "threads": torch.get_num_threads(),
    }


def random_state() -> dict[str, Any]:
    """The state of every global generator that a model, a loss or a transform may draw from."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put all of them back."""
    kind, keys, place, *rest = state["numpy"]
    is_keys = isinstance(keys, Tensor) and keys.shape == (624,) and keys.dtype == torch.int64
    if kind != "MT19937" or not is_keys or type(place) is not int or not 0 <= place <= 624:
        raise ValueError("the state of numpy's generator is not one")  # it takes any place, and then reads there
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, *rest))  # noqa: NPY002


def random_as_bytes() -> bytes:
    """The same as text, for another process."""
    state = random_state()
    (kind, keys, *rest), (version, internal, gauss) = state["numpy"], state["python"]
    return json.dumps(
        {
            "torch": state["torch"].tolist(),
            "cuda": [one.tolist() for one in state["cuda"]],
            "python": [version, list(internal), gauss],
            "numpy": [kind, keys.tolist(), *rest],
        }
    ).encode()


def random_from_bytes(content: bytes) -> dict[str, Any]:
    """The state that `random_as_bytes` told."""
    told = json.loads(content)
    kind, keys, *rest = told["numpy"]
    return {
        "torch": torch.tensor(told["torch"], dtype=torch.uint8),
        "cuda": [torch.tensor(one, dtype=torch.uint8) for one in told["cuda"]],
        "python": tuple(told["python"]),
        "numpy": (kind, torch.tensor(keys, dtype=torch.int64), *rest),
    }


def seed_everything(seed: int) -> None:
    """Start all of them from one seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
