"""From the file of a `SizedNet` and the model's code to the network at its sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decomposable import methods
from decomposable.errors import ArtifactError, DecomposableError
from decomposable.methods.sized import SizedNet, restored, sizes_of
from decomposable.settings import Settings

_MOST_INPUT = 1 << 26  # numbers in one sample: nothing is allocated that a file merely claims


def load_sized(
    path: str | os.PathLike[str], description: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module
) -> SizedNet:
    """The network of a file, around a model of any weights, which is changed."""
    name, structure = description.get("method"), description.get("structure")
    if name not in methods.METHODS or not isinstance(structure, Mapping):
        raise ArtifactError(f"{path}: its method is {name!r:.40}; allowed: {', '.join(methods.METHODS)}")
    method: Any = methods.find(str(name))
    if not hasattr(method, "rebuilt"):
        raise ArtifactError(f"{path}: method {name} makes no such file; its networks are those of decompose()")
    if any(p.is_meta for p in model.parameters()):
        model = model.to_empty(device="cpu")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        example = torch.zeros(1, *_input_shape(path, description), device=device)
        network, build = method.rebuilt(model, example, Settings(), structure)
        for size in sizes_of(path, description):
            if method.size_again(network, size.value, example) != size:
                raise ArtifactError(f"its {size.name} does not cost what it says")
    except DecomposableError as error:
        raise ArtifactError(f"{path}: it does not go with this model: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0][:150]
        raise ArtifactError(f"{path}: it does not go with this model ({type(error).__name__}: {reason})") from error
    return restored(path, description, tensors, network, build)


def _input_shape(path: str | os.PathLike[str], description: Mapping[str, Any]) -> list[int]:
    """Of one sample, as the method or whoever made the file noted it; some methods do without."""
    info = description.get("info")
    places = [place for place in (description["structure"], info) if isinstance(place, Mapping)]
    shape: Any = next((place["input_shape"] for place in places if "input_shape" in place), [])
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and n > 0 for n in shape)
    if not is_shape or math.prod(shape) > _MOST_INPUT:
        raise ArtifactError(f"{path}: its description is damaged: the shape of the input is {shape!r:.40}")
    return list(shape)
