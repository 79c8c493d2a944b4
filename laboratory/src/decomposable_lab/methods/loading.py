"""From a file of the laboratory and the model's code to a network: `load`. A method makes its own sizes again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.network.file.container import Container, FilePath, open_container
from decomposable.network.file.parsing import naming, read_built_by
from decomposable.network.loading import built_model
from decomposable.network.loading import load as load_decomposed
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError, ModelNeededError
from decomposable_edge.fields import Fields
from decomposable_edge.text import one_line
from decomposable_lab.methods.base import Rebuilding
from decomposable_lab.methods.sized import KIND, SizedNet, restored, sizes_of

_MOST_INPUT = 1 << 23  # numbers in one sample: nothing is allocated that a file merely claims
MOST_COMPUTED = 3 * 256 * 256  # the same where it has to be computed with, for want of a better way
_INNER = "model."  # what the methods call the model inside of their own module
_NOT_COMPUTED_WITH = (torch.float8_e4m3fn, torch.float8_e5m2)
_USUAL_ENTRIES, _MOST_ENTRIES = 64, 1024  # of a list of sizes, widths or layers: each takes time to look at


@dataclass(frozen=True, eq=False)
class _Stored:
    """What a file of the laboratory holds, and the model that is to be filled."""

    description: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    model: nn.Module
    is_from_file: bool  # the model was built because the file says so


@torch.inference_mode(False)  # weights made in that mode could not be trained
def load(path: FilePath, model: nn.Module | None = None, **size: Any) -> Any:
    """Return the network that a file holds: a `SizedNet`, or whatever ``decomposable.load`` makes of its file.

    Args:
        path: the file.
        model: gives the architecture, as to ``decomposable.load``.
        size: one size, given as to ``resize_``; a `SizedNet` takes ``macs=`` or ``params=``.
    """
    with open_container(path) as container:
        if container.description.get("kind") != KIND:
            return load_decomposed(path, model, **size)
        with naming(path):
            stored = _read(path, container, model)
    for name in size:
        if name not in ("macs", "params"):
            raise InvalidArgumentError(f"{name}=: {path} holds the sizes of a method; allowed: macs, params")
    return _sized(path, stored, size)


def _read(path: FilePath, container: Container, model: nn.Module | None) -> _Stored:
    """Return the content of a file, with a model of its own to be filled.

    A model that was built because the file says so is on the meta device, and stays there until the tensors of the file
    have turned out to fit: no memory is taken for a claim.
    """
    if model is not None:
        own = deep_copy(rewire(unwrap(model), {}))
        return _Stored(container.description, container.read_all(), own, is_from_file=False)
    note = read_built_by(Fields({"built_by": None, **container.description}, "the file"))
    built, origin = built_model(path, note)
    if note is not None and note["is_changed"]:
        raise ModelNeededError(
            f"model= is needed: {path} was built by {origin}; allowed: a model as the one that was saved"
        )
    return _Stored(container.description, container.read_all(), built, is_from_file=True)


def _sized(path: FilePath, found: _Stored, size: Mapping[str, Any]) -> SizedNet:
    """Return the network of a method; `size` is taken as by ``resize_``."""
    description, tensors = found.description, found.tensors
    method = _method(path, description, len(tensors))
    for name, tensor in tensors.items():
        if tensor.dtype in _NOT_COMPUTED_WITH:
            raise ArtifactError(f"{path}: tensor {one_line(name, 80)!r} is {tensor.dtype}")
    network, build = _rebuilt(path, method, found)
    net = restored(path, description, tensors, network, build)
    try:
        if size:
            net.resize_(**size)
    except ArtifactError as error:  # statistics of that size which do not fit
        raise ArtifactError(f"{path}: {one_line(error)}") from error
    return net


def _rebuilt(path: FilePath, method: Any, found: _Stored) -> tuple[nn.Module, Any]:
    """Return the network that the method makes again, to be filled, and the function from a size to its module.

    The shape of the input is only claimed, so that the model is tried on the meta device, where nothing is computed.
    A model of the user's that cannot run there is tried where it is, on an input that is not large.
    """
    description, model, is_from_file = found.description, found.model, found.is_from_file
    shape = _input_shape(path, description)
    real = [p.device for p in model.parameters() if not p.is_meta]
    device = real[0] if real else torch.device("cpu")
    try:
        outline = deep_copy(model).to("meta")
        network, build = _checked(path, method, description, outline, torch.zeros(1, *shape, device="meta"))
        stored = {key.removeprefix("state/"): t.shape for key, t in found.tensors.items() if key.startswith("state/")}
        if is_from_file and stored != {key: tensor.shape for key, tensor in network.state_dict().items()}:
            raise ArtifactError(f"{path}: its weights are not those of the model that it names; give model=")
        _take_memory_(network, model, device)
        return network, build
    except ArtifactError:
        if is_from_file or not real or math.prod(shape) > MOST_COMPUTED:
            raise
    return _checked(path, method, description, model, torch.zeros(1, *shape, device=device))


def _checked(
    path: FilePath, method: Any, description: Mapping[str, Any], model: nn.Module, example: Tensor
) -> tuple[nn.Module, Any]:
    """Return the same for an input that is there; the sizes have to cost what the file says."""
    sizes = sizes_of(path, description)
    try:
        network, build = method.rebuilt(model, example, Settings(), description["structure"])
        for each in sizes:
            if method.size_again(network, each.value, example) != each:
                raise ArtifactError(f"its {each.name} does not cost what it says")
        return network, build
    except DecomposableError as error:
        raise ArtifactError(f"{path}: it does not go with this model: {one_line(error)}") from error
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        AssertionError,
    ) as error:
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
            full = f"{path}.{name}" if path else name
            own = given.get(full.removeprefix(_INNER))
            if own is None or own.shape != buffer.shape:
                raise ArtifactError(f"model: its buffer '{full}' is not in the file, nor in the model")
            module._buffers[name] = own.to(device, copy=True)


def _method(path: FilePath, description: Mapping[str, Any], tensors: int) -> Any:
    """Return the method that made the file, which has to be one that makes such files."""
    name, structure = description.get("method"), description.get("structure")
    if not isinstance(name, str) or name not in methods.METHODS or not isinstance(structure, Mapping):
        raise ArtifactError(f"{path}: its method is {name!r:.40}; allowed: {', '.join(methods.METHODS)}")
    method: Any = methods.find(name)
    if not isinstance(method, Rebuilding):
        raise ArtifactError(f"{path}: method {name} makes no such file; its networks are those of decompose()")
    longest = max(len(part) for part in (description.get("sizes"), *structure.values(), []) if isinstance(part, list))
    if longest > min(max(_USUAL_ENTRIES, tensors), _MOST_ENTRIES):
        raise ArtifactError(f"{path}: its description is damaged: a list of {longest:,} for {tensors:,} tensors")
    return method


def _input_shape(path: FilePath, description: Mapping[str, Any]) -> list[int]:
    """Of one sample, as the method or whoever made the file noted it; some methods do without."""
    info = description.get("info")
    places = [place for place in (description["structure"], info) if isinstance(place, Mapping)]
    shape: Any = next((place["input_shape"] for place in places if "input_shape" in place), [])
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and n > 0 for n in shape)
    if not is_shape or math.prod(shape) > _MOST_INPUT:
        raise ArtifactError(f"{path}: its description is damaged: the shape of the input is {shape!r:.40}")
    return list(shape)
