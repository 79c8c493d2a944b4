"""From a file and the model's code to a network: `load`. A method makes its own sizes again."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decomposable.training import methods
from decomposable.core.tree import deep_copy
from decomposable.recipes.settings import Settings
from decomposable.network.file.skeleton import join
from decomposable.network.loading import Unbuilt, load_network
from decomposable_lab.methods.sized import SizedNet, restored, sizes_of
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.sizing.plans import SizeRequest
from decomposable_edge.text import one_line

_MOST_INPUT = 1 << 23  # numbers in one sample: nothing is allocated that a file merely claims
_MOST_COMPUTED = 3 * 256 * 256  # the same where it has to be computed with, for want of a better way
_INNER = "model."  # what the methods call the model inside of their own module
_NOT_COMPUTED_WITH = (torch.float8_e4m3fn, torch.float8_e5m2)
_USUAL_ENTRIES, _MOST_ENTRIES = 64, 1024  # of a list of sizes, widths or layers: each takes time to look at


@torch.inference_mode(False)  # weights made in that mode could not be trained
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    macs: float | None = None,
    params: float | None = None,
    ratio: float | None = None,
    ranks: Mapping[str, int] | None = None,
    latency_ms: float | None = None,
    align: int | Literal["auto", "measured"] | None = None,
    batch: int | None = None,
) -> Any:
    """The network that a file holds: a `DecomposedNet` of ``net.save(path)``, a plain module of ``save_size``, a
    `SizedNet` of a method that makes other sizes.

    The decomposed network is as it was saved, with the same size in force, mode, types and statistics; nothing is
    decomposed again. The plain module is what ``extract()`` returned for that size, to be run or trained on.

    Args:
        path: the file.
        model: gives the architecture, and the buffers that a state dict leaves out. It stays as it is; its weights do
            not matter, but the network is made where they are (on a CPU if they are on the meta device). Networks of
            `decomposable.models` do without it: the file knows how they are built.
        macs, params, ratio, ranks, latency_ms, align, batch: a size, given as to ``resize_``; what was measured lies
            beside the file. The network has that size and smaller ones, gives the very same results as after
            ``resize_``, and only that part of the file is read.

    Example:
        >>> import tempfile, pathlib, decomposable as dn
        >>> build = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "net.safetensors"
        ...     dn.decompose(build()).save(path, info={"accuracy": 0.9})
        ...     net = load(path, model=build())
        ...     small = load(path, model=build(), ratio=0.5)
        >>> net.plan.is_full, net.info, small.plan == net.resize_(ratio=0.5)
        (True, {'accuracy': 0.9}, True)
    """
    request = SizeRequest(
        macs=macs, params=params, ratio=ratio, ranks=ranks, latency_ms=latency_ms, align=align, batch=batch
    )
    size = request if request.given() else None
    found = load_network(path, model, size)
    return _sized(path, found, size) if isinstance(found, Unbuilt) else found


def _sized(path: str | os.PathLike[str], found: Unbuilt, size: SizeRequest | None) -> SizedNet:
    """The network of a method that makes other sizes; `size` is taken as by ``resize_``.

    A model that was built because the file says so is on the meta device, and stays there until the tensors of the file
    have turned out to fit: no memory is taken for a claim.
    """
    description, tensors = found.description, found.tensors
    for name in size.given() if size is not None else ():
        if name not in ("macs", "params"):
            raise InvalidArgumentError(f"{name}=: {path} holds the sizes of a method; allowed: macs, params")
    method = _method(path, description, len(tensors))
    for name, tensor in tensors.items():
        if tensor.dtype in _NOT_COMPUTED_WITH:
            raise ArtifactError(f"{path}: tensor {one_line(name, 80)!r} is {tensor.dtype}")
    network, build = _rebuilt(path, method, found)
    net = restored(path, description, tensors, network, build)
    try:
        if size is not None:
            net.resize_(**size.given())
    except ArtifactError as error:  # statistics of that size which do not fit
        raise ArtifactError(f"{path}: {one_line(error)}") from error
    return net


def _rebuilt(path: str | os.PathLike[str], method: Any, found: Unbuilt) -> tuple[nn.Module, Any]:
    """The network that the method makes again, to be filled, and the function from a size to its module.

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
        if is_from_file or not real or math.prod(shape) > _MOST_COMPUTED:
            raise
    return _checked(path, method, description, model, torch.zeros(1, *shape, device=device))


def _checked(
    path: str | os.PathLike[str], method: Any, description: Mapping[str, Any], model: nn.Module, example: Tensor
) -> tuple[nn.Module, Any]:
    """The same for an input that is there; the sizes have to cost what the file says."""
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


def _input_shape(path: str | os.PathLike[str], description: Mapping[str, Any]) -> list[int]:
    """Of one sample, as the method or whoever made the file noted it; some methods do without."""
    info = description.get("info")
    places = [place for place in (description["structure"], info) if isinstance(place, Mapping)]
    shape: Any = next((place["input_shape"] for place in places if "input_shape" in place), [])
    is_shape = isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and n > 0 for n in shape)
    if not is_shape or math.prod(shape) > _MOST_INPUT:
        raise ArtifactError(f"{path}: its description is damaged: the shape of the input is {shape!r:.40}")
    return list(shape)
