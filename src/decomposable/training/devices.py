"""Which device computes, and what its results depend on."""

from __future__ import annotations

from typing import Any

import torch

from decomposable.errors import InvalidArgumentError


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


def bits_depend_on(device: str) -> dict[str, Any]:
    """What may change the last bits of a computation."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "PyTorch": str(torch.__version__),
        "device": torch.cuda.get_device_name(device) if on_gpu else torch.device(device).type,
        "threads": torch.get_num_threads(),
    }
