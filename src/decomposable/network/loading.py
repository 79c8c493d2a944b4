"""From a file of a decomposed network, or of one size of it, and the model's code to the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import as_held
from decomposable.core.layers import CONVOLUTIONS, KINDS, TRANSPOSED, ChainLayers, Layer, avoid_fast_paths_
from decomposable.core.tracing import call_with_first
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.core.unpacked import replaceable, with_opened
from decomposable.models.origin import BUILDERS, rebuilt
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import FilePath, open_container
from decomposable.network.file.contents import Artifact
from decomposable.network.file.parsing import StoredSize, kind_of, naming, read_built_by, read_opened, size_from
from decomposable.network.file.shrinking import read_network
from decomposable.network.file.skeleton import Skeleton, TensorSlot, join, slots_of
from decomposable_edge.errors import InvalidArgumentError, ModelNeededError
from decomposable_edge.fields import Damaged, Fields
from decomposable_edge.sizing.plans import SizeKeywords, SizeRequest
from decomposable_edge.text import one_line

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.inference_mode(False)  # weights made in that mode could not be trained
def load(path: FilePath, model: nn.Module | None = None, **size: Unpack[SizeKeywords]) -> Any:
    """Return the network that a file holds: a `DecomposedNet` of ``net.save(path)``, a plain module of ``save_size``.

    The decomposed network is as it was saved, with the same current size, mode, types and statistics; nothing is
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
        ...     report = dn.decompose(build()).save(path, info={"accuracy": 0.9})
        ...     net = load(path, model=build())
        ...     small = load(path, model=build(), ratio=0.5)
        >>> net.plan().is_full, net.info, small.plan() == net.resize_(ratio=0.5)
        (True, {'accuracy': 0.9}, True)
    """
    request = SizeRequest.of("load", size, "model")
    asked = request if request.given() else None
    with open_container(path) as container, naming(path):
        kind = kind_of(path, container.description)
        top = Fields({"built_by": None, "opened": [], **container.description}, "the file")
        if model is not None:
            own = deep_copy(rewire(unwrap(model), {}))
            filling = _Filling(path, _opened(path, own, read_opened(top)))
        else:
            filling = _Filling(path, *built_model(path, read_built_by(top)))
        if kind == "network":
            return filling.network(read_network(container, asked).to(filling.device), asked)
        if asked is not None:
            raise InvalidArgumentError(
                f"{next(iter(asked.given()))}=: {path} holds one size only; allowed: no size, or the network file it "
                "was made from"
            )
        return filling.plain_module(size_from(container.description, container.read_all()))


def built_model(path: FilePath, note: Mapping[str, Any] | None) -> tuple[nn.Module, str]:
    """Return the model that the file says, on the meta device, and who built it."""
    if note is None:
        raise ModelNeededError(
            f"model= is needed: {path} holds weights but not the code that uses them; "
            "allowed: a model built as the one that was saved, of any weights"
        )
    if note["name"] not in BUILDERS:
        raise ModelNeededError(
            f"model= is needed: {path} says that {note['name']!r:.60} built its model, which is not one of "
            f"decomposable.models; allowed: a model built so, of any weights"
        )
    try:
        return rebuilt(note), f"{note['name']}, changed since" if note["is_changed"] else str(note["name"])
    except InvalidArgumentError as error:
        raise Damaged(str(error)) from error


def _opened(path: FilePath, model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The model with the layers inside that the file has there."""
    can_be = replaceable(model) if names else {}
    paths = dict(model.named_modules(remove_duplicate=False)) if names else {}
    plain = {name for name in names if name not in can_be and isinstance(paths.get(name), (*CONVOLUTIONS, nn.Linear))}
    for name in names:
        if name not in can_be and name not in plain:  # a layer that was settled may come as it is
            raise InvalidArgumentError(
                one_line(
                    f"model: it is not the one of {path}: '{name:.80}' is an attention, a recurrent layer, a Conv1D or "
                    "a layer with a computed weight or a forward of its own there, whose weights are decomposed"
                )
            )
    return with_opened(model, [can_be[name] for name in names if name in can_be])


@dataclass(frozen=True, eq=False)
class _Filling:
    """A model of its own, to be filled with what a file holds; `origin` is who built it where the file said that, and
    not the caller gave it.
    """

    path: FilePath
    base: nn.Module
    origin: str | None = None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.base.parameters() if not p.is_meta), torch.device("cpu"))

    def network(self, artifact: Artifact, size: SizeRequest | None) -> DecomposedNet:
        """The decomposed network of the model."""
        self._fit_(artifact.skeleton, artifact.state)
        call, layers = artifact.call, _layers_of(self.base, artifact.skeleton)
        forward = call_with_first if call is None or call.is_default else call.forward
        net = DecomposedNet(base=self.base, layers=layers, parts=artifact, forward=forward)
        net.latency_beside = Path(self.path).absolute()
        if size is not None:
            net._warn_once(net.plan(), stacklevel=5)  # the caller of load
        return net

    def plain_module(self, size: StoredSize) -> nn.Module:
        """The model with chains in place of the layers that have become chains."""
        device = self.device
        moved: dict[int, Tensor] = {}  # what is one tensor stays one
        state = {key: None if t is None else moved.setdefault(id(t), t.to(device)) for key, t in size.state.items()}
        self._fit_(size.skeleton, state)
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in _layers_of(self.base, size.skeleton):
            if layer.name in size.chains:
                is_trainable = size.skeleton.trainable.get(join(layer.name, "weight"), True)
                stages = [t.to(device) for t in as_held(layer.chain, size.chains[layer.name])]
                weights = [nn.Parameter(t, requires_grad=is_trainable) for t in stages]
                replacements |= {module: ChainLayers(module, layer.chain).build(*weights) for module in layer.modules}
        network = rewire(self.base, replacements)
        avoid_fast_paths_(network)
        return network

    def _fit_(self, skeleton: Skeleton, state: Mapping[str, Tensor | None]) -> None:
        """Give the model the file's parameters, buffers, flags and modes, or say in what it is another model."""
        slots = slots_of(self.base, persistent=True)
        misfit = _misfit(slots, skeleton, state)
        if misfit is not None and self.origin is not None:
            raise self._changed(f": {one_line(self._other_model(misfit))}")
        if misfit is not None:
            raise InvalidArgumentError(one_line(f"model: {self._other_model(misfit)}"))
        self._refuse_changed(skeleton.built_by)
        first_keys: dict[int, str] = {}
        for key, tensor in state.items():
            if tensor is None:
                continue
            first = first_keys.setdefault(id(tensor), key)
            if first == key:
                slots[key].put(tensor)
            elif slots[key].tensor is not slots[first].tensor:  # one in the file, two in the model
                setattr(slots[key].module, slots[key].name, slots[first].tensor)
        for key, slot in slots.items():
            tensor = state[key]
            if tensor is not None and slot.tensor.data_ptr() != tensor.data_ptr():
                misfit = _differs(key, "a tensor of its own", "one that it shares with another layer")
                raise InvalidArgumentError(one_line(f"model: {self._other_model(misfit)}"))
            if slot.is_parameter:
                slot.tensor.requires_grad_(skeleton.trainable[key])
        for key, slot in slots_of(self.base, persistent=False).items():
            if slot.tensor.is_meta:
                raise InvalidArgumentError(f"model: its buffer '{key}' is on the meta device and not in {self.path}")
            if key in skeleton.dtypes and skeleton.dtypes[key] != slot.tensor.dtype:
                slot.put(slot.tensor.to(skeleton.dtypes[key]))
        others = set(skeleton.other_mode)
        for name, module in self.base.named_modules():
            module.training = skeleton.training != (name in others)

    def _other_model(self, misfit: str) -> str:
        return f"it is not the one of {self.path}: {misfit}"

    def _refuse_changed(self, note: Mapping[str, Any] | None) -> None:
        """The file says itself that its model is not any more what was built here."""
        if note is not None and self.origin is not None and note["is_changed"]:
            raise self._changed()

    def _changed(self, why: str = "") -> ModelNeededError:
        return ModelNeededError(
            f"model= is needed: {self.path} was built by {self.origin}{why}; allowed: a model as the one that was saved"
        )


def _misfit(slots: Mapping[str, TensorSlot], skeleton: Skeleton, state: Mapping[str, Tensor | None]) -> str | None:
    """The first layer, in the file's order, that the model has not or has in another shape; None if there is none."""
    dense = {join(path, "weight"): layer.chain.held_shape for layer in skeleton.layers for path in layer.paths}
    for key in [*state, *slots]:
        in_file = in_model = "nothing"
        stored = state.get(key)
        shape = dense.get(key) if stored is None else stored.shape
        if key in state:
            in_file = _in_words(key in skeleton.trainable, shape)
        if key in slots:
            tensor = slots[key].tensor
            in_model = _in_words(slots[key].is_parameter, None if nn.parameter.is_lazy(tensor) else tensor.shape)
        is_replaced = key in state and shape is None and key in slots  # its shape is not known any more
        if in_file != in_model and not is_replaced:
            return _differs(key, in_file, in_model)
        if stored is not None and _kind(stored.dtype) != _kind(slots[key].tensor.dtype):
            return _differs(key, f"one of {stored.dtype}", f"one of {slots[key].tensor.dtype}")
    for layer in skeleton.layers:
        for name in layer.paths:
            module = slots[join(name, "weight")].module
            expected = (TRANSPOSED if layer.transposed else KINDS)[len(layer.shape) - 2]
            if not isinstance(module, expected):
                return _differs(join(name, "weight"), f"a {expected.__name__}", f"a {type(module).__name__}")
    return None


def _kind(dtype: torch.dtype) -> str:
    """What the type is for: numbers to compute with are alike, of whatever precision."""
    return "float" if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) else str(dtype)


def _in_words(is_parameter: bool, shape: tuple[int, ...] | None) -> str:
    size = "no shape yet" if shape is None else f"shape {tuple(shape)}"
    return f"{'a parameter' if is_parameter else 'a buffer'} of {size}"


def _differs(key: str, in_file: str, in_model: str) -> str:
    layer, _, name = key.rpartition(".")
    return f"for '{name}' of layer '{layer}' the file has {in_file}, the model {in_model}"


def _layers_of(base: nn.Module, skeleton: Skeleton) -> tuple[Layer, ...]:
    return tuple(
        Layer(
            stored.name,
            tuple(dict.fromkeys(map(base.get_submodule, stored.paths))),  # type: ignore[arg-type]
            stored.form,
            stored.shape,
            stored.chain,
        )
        for stored in skeleton.layers
    )
