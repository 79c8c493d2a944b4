"""From the file of a `SizedNet` and the model's code to the network at its sizes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decomposable import methods
from decomposable.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable.methods.sized import SizedNet, restored, sizes_of
from decomposable.settings import Settings
from decomposable.text import one_line

_MOST_INPUT = 1 << 23  # numbers in one sample: nothing is allocated that a file merely claims
_NOT_COMPUTED_WITH = (torch.float8_e4m3fn, torch.float8_e5m2)
_USUAL_ENTRIES, _MOST_ENTRIES = 64, 1024  # of a list of sizes, widths or layers: each takes time to look at


def load_sized(
    path: str | os.PathLike[str],
    description: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    size: Mapping[str, Any] | None = None,
    *,
    is_from_file: bool = False,
) -> SizedNet:
    """The network of a file, around a model of any weights, which is changed; `size` is taken as by ``resize_``.

    A model that was built because the file says so is on the meta device, and stays there until the tensors of the file
    have turned out to fit: no memory is taken for a claim.
    """
    if size is not None and not set(size) <= {"macs", "params"}:
        raise InvalidArgumentError(f"{next(iter(size))}=: {path} holds the sizes of a method; allowed: macs, params")
    method = _method(path, description, len(tensors))
    strange = next((name for name, tensor in tensors.items() if tensor.dtype in _NOT_COMPUTED_WITH), None)
    if strange is not None:
        raise ArtifactError(f"{path}: tensor {one_line(strange, 80)!r} is {tensors[strange].dtype}")
    if any(p.is_meta for p in model.parameters()) and not is_from_file:
        model = model.to_empty(device="cpu")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        example = torch.zeros(1, *_input_shape(path, description), device=device)
        network, build = method.rebuilt(model, example, Settings(), description["structure"])
        for each in sizes_of(path, description):
            if method.size_again(network, each.value, example) != each:
                raise ArtifactError(f"its {each.name} does not cost what it says")
    except DecomposableError as error:
        raise ArtifactError(f"{path}: it does not go with this model: {one_line(error)}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 150)}"
        raise ArtifactError(f"{path}: it does not go with this model ({reason})") from error
    if is_from_file:
        _require_shapes(path, network, tensors)
        network = network.to_empty(device="cpu")
    net = restored(path, description, tensors, network, build)
    try:
        if size is not None:
            net.resize_(**size)
    except ArtifactError as error:  # statistics of that size which do not fit
        raise ArtifactError(f"{path}: {one_line(error)}") from error
    return net


def _method(path: str | os.PathLike[str], description: Mapping[str, Any], tensors: int) -> Any:
    """The method that made the file, which has to be one that makes such files."""
    name, structure = description.get("method"), description.get("structure")
    if not isinstance(name, str) or name not in methods.METHODS or not isinstance(structure, Mapping):
        raise ArtifactError(f"{path}: its method is {name!r:.40}; allowed: {', '.join(methods.METHODS)}")
    method: Any = methods.find(name)
    if not hasattr(method, "rebuilt"):
        raise ArtifactError(f"{path}: method {name} makes no such file; its networks are those of decompose()")
    longest = max(len(part) for part in (description.get("sizes"), *structure.values(), []) if isinstance(part, list))
    if longest > min(max(_USUAL_ENTRIES, tensors), _MOST_ENTRIES):
        raise ArtifactError(f"{path}: its description is damaged: a list of {longest:,} for {tensors:,} tensors")
    return method


def _require_shapes(path: str | os.PathLike[str], network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a network that is larger than the tensors there are for it."""
    stored = {key.removeprefix("state/"): t.shape for key, t in tensors.items() if key.startswith("state/")}
    if stored != {key: tensor.shape for key, tensor in network.state_dict().items()}:
        raise ArtifactError(f"{path}: its weights are not those of the model that it names; give model=")


def _input_shape(path: str | os.PathLike[str], description: Mapping[str, Any]) -> list[int]:
    """Of one sample, as the method or whoever made the file noted it; some methods do without."""
    info = description.get("info")
    places = [place for place in (description["structure"], info) if isinstance(place, Mapping)]
    shape: Any = next((place["input_shape"] for place in places if "input_shape" in place), [])
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and n > 0 for n in shape)
    if not is_shape or math.prod(shape) > _MOST_INPUT:
        raise ArtifactError(f"{path}: its description is damaged: the shape of the input is {shape!r:.40}")
    return list(shape)
