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
from decomposable.storage.skeleton import join
from decomposable.text import one_line
from decomposable.tree import deep_copy

_MOST_INPUT = 1 << 23  # numbers in one sample: nothing is allocated that a file merely claims
_MOST_COMPUTED = 3 * 256 * 256  # the same where it has to be computed with, for want of a better way
_INNER = "model."  # what the methods call the model inside of their own module
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
    network, build = _rebuilt(path, method, description, model, tensors, is_from_file=is_from_file)
    net = restored(path, description, tensors, network, build)
    try:
        if size is not None:
            net.resize_(**size)
    except ArtifactError as error:  # statistics of that size which do not fit
        raise ArtifactError(f"{path}: {one_line(error)}") from error
    return net


def _rebuilt(
    path: str | os.PathLike[str],
    method: Any,
    description: Mapping[str, Any],
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    is_from_file: bool,
) -> tuple[nn.Module, Any]:
    """The network that the method makes again, to be filled, and the function from a size to its module.

    The shape of the input is only claimed, so that the model is tried on the meta device, where nothing is computed.
    A model of the user's that cannot run there is tried where it is, on an input that is not large.
    """
    shape = _input_shape(path, description)
    real = [p.device for p in model.parameters() if not p.is_meta]
    device = real[0] if real else torch.device("cpu")
    try:
        outline = deep_copy(model).to("meta")
        network, build = _checked(path, method, description, outline, torch.zeros(1, *shape, device="meta"))
        if is_from_file:
            _require_shapes(path, network, tensors)
        _take_memory_(network, model, device)
        return network, build
    except ArtifactError:
        if is_from_file or not real or math.prod(shape) > _MOST_COMPUTED:
            raise
    return _checked(path, method, description, model, torch.zeros(1, *shape, device=device))


def _checked(
    path: str | os.PathLike[str], method: Any, description: Mapping[str, Any], model: nn.Module, example: Tensor
) -> tuple[nn.Module, Any]:
    """The same for an input that is there; the sizes have to cost what the file says."""
    try:
        network, build = method.rebuilt(model, example, Settings(), description["structure"])
        for each in sizes_of(path, description):
            if method.size_again(network, each.value, example) != each:
                raise ArtifactError(f"its {each.name} does not cost what it says")
        return network, build
    except DecomposableError as error:
        raise ArtifactError(f"{path}: it does not go with this model: {one_line(error)}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {one_line(error, 150)}"
        raise ArtifactError(f"{path}: it does not go with this model ({reason})") from error


def _take_memory_(network: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory; buffers that a file does not hold are the model's own.

    Weights that are one stay one.
    """
    given = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    made: dict[int, Tensor] = {}
    for path, module in network.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fresh = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
                setattr(module, name, made.setdefault(id(parameter), fresh))
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if name not in module._non_persistent_buffers_set:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))
                continue
            own = given.get(join(path, name).removeprefix(_INNER))
            if own is None or own.shape != buffer.shape:
                raise ArtifactError(f"model: its buffer '{join(path, name)}' is not in the file, nor in the model")
            module._buffers[name] = own.to(device, copy=True)


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
