"""Which device computes, and what its results depend on: versions, threads, and the global generators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.text import first_line


def choose_device(name: str) -> str:
    """Return the device by its name; "auto" is a CUDA GPU if there is one, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:  # each backend fails in a way of its own
        allowed = "auto, cpu, cuda, cuda:1 …"
        text = f"--device {name}: it cannot be used here ({first_line(error)[:100]}); allowed: {allowed}"
        raise InvalidArgumentError.about("--device", name, allowed, text) from error
    return name


def make_deterministic() -> None:
    """Have cuDNN choose the same algorithms every time, so that a resumed run repeats; a CPU does so anyway."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def bits_depend_on(device: str, processes: int = 1) -> dict[str, Any]:
    """Return what may change the last bits of a computation."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "processes": processes,
        "PyTorch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if on_gpu else torch.device(device).type,
        "threads": torch.get_num_threads(),
    }


def random_state() -> dict[str, Any]:
    """Return the state of every global generator that a model, a loss or a transform may draw from, as JSON has it."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [state.numpy().tobytes().hex() for state in cuda],
        "python": [version, np.array(words, dtype="<u4").tobytes().hex(), gauss],
        "numpy": [kind, np.asarray(keys, dtype="<u4").tobytes().hex(), *rest],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put all of them back."""

    def array(digits: str, dtype: str) -> np.ndarray:
        return np.frombuffer(bytearray.fromhex(digits), dtype=dtype)

    kind, digits, place, *rest = state["numpy"]
    keys = array(digits, "<u4")
    if kind != "MT19937" or keys.shape != (624,) or type(place) is not int or not 0 <= place <= 624:
        raise ValueError("the state of numpy's generator is not one")  # it takes any place, and then reads there
    torch.set_rng_state(torch.from_numpy(array(state["torch"], "u1")))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(array(each, "u1")) for each in state["cuda"]])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array(words, "<u4").tolist()), gauss))
    np.random.set_state((kind, keys, place, *rest))  # noqa: NPY002


def seed_everything(seed: int) -> None:
    """Start all of them from one seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
