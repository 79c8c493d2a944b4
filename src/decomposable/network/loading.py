"""From a file of a decomposed network, or of one size of it, and the model's code to the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from decomposable.core.factors import as_held
from decomposable.core.layers import CONVOLUTIONS, KINDS, TRANSPOSED, Layer
from decomposable.core.tracing import call_with_first
from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.core.unpacked import replaceable, with_opened
from decomposable.models.origin import BUILDERS, rebuilt
from decomposable.network.artifact import read_network
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.container import FilePath, open_container
from decomposable.network.file.contents import Artifact, Skeleton, TensorSlot, join, slots_of
from decomposable.network.file.parsing import StoredSize, kind_of, naming, read_built_by, size_from
from decomposable.network.original import chains_of, with_replaced
from decomposable_edge.errors import InvalidArgumentError, ModelNeededError
from decomposable_edge.fields import Damaged, Fields
from decomposable_edge.sizing.plans import SizeKeywords, SizeRequest
from decomposable_edge.text import one_line

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SAME = "a model built as the one that was saved, of any weights"


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
        top = Fields(container.description, "the file")
        if model is not None:
            own = deep_copy(rewire(unwrap(model), {}))
            filling = _Filling(path, _opened(path, own, top.texts("opened")))
        else:
            filling = _Filling(path, *built_model(path, read_built_by(top)))
        if kind == "network":
            return filling.network(read_network(container, asked), asked)
        if asked is not None:
            option, came = next(iter(asked.given().items()))
            allowed = "no size, or the network file it was made from"
            raise InvalidArgumentError.about(option, came, allowed, why=f"{path} holds one size only")
        return filling.plain_module(size_from(container.description, container.read_all()))


def built_model(path: FilePath, note: Mapping[str, Any] | None) -> tuple[nn.Module, str]:
    """Return the model that the file says, on the meta device, and who built it."""
    if note is None:
        raise _model_needed(f"{path} holds weights but not the code that uses them")
    name = note["name"]
    if name not in BUILDERS:
        raise _model_needed(f"{path} says that {name!r:.60} built its model, which is not one of decomposable.models")
    try:
        return rebuilt(note), f"{name}, changed since" if note["is_changed"] else str(name)
    except InvalidArgumentError as error:
        raise Damaged(str(error)) from error


def _opened(path: FilePath, model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the model with the layers inside that the file has there."""
    if not names:
        return model
    can_be, modules = replaceable(model), dict(model.named_modules(remove_duplicate=False))
    for name in names:  # a layer that was settled may come as it is
        if name not in can_be and not isinstance(modules.get(name), (*CONVOLUTIONS, nn.Linear)):
            kinds = "an attention, a recurrent layer, a Conv1D or one with a computed weight or a forward of its own"
            why = one_line(f"it is not the one of {path}: '{name:.80}' is {kinds} there, whose weights are decomposed")
            raise InvalidArgumentError.about("model", name, _SAME, why=why)
    return with_opened(model, [can_be[name] for name in names if name in can_be])


@dataclass(frozen=True, eq=False)
class _Filling:
    """A model of its own, to be filled with what a file holds.

    `origin` is who built it where the file said that, and not the caller gave it.
    """

    path: FilePath
    base: nn.Module
    origin: str | None = None

    def network(self, artifact: Artifact, size: SizeRequest | None) -> DecomposedNet:
        """Return the decomposed network of the model."""
        self._fill_(artifact.skeleton, artifact.state)
        call, layers = artifact.call, self._layers(artifact.skeleton)
        net = DecomposedNet(
            base=self.base,
            layers=layers,
            parts=artifact.map(lambda tensor: tensor.to(self._device)),
            forward=call_with_first if call is None or call.is_default else call.forward,
        )
        net.latency_beside = Path(self.path).absolute()
        if size is not None:
            net._warn_once(net.plan(), stacklevel=5)  # the caller of load
        return net

    def plain_module(self, size: StoredSize) -> nn.Module:
        """Return the model with chains in place of the layers that have become chains."""
        self._fill_(size.skeleton, size.state)
        replacements: dict[nn.Module, nn.Module] = {}
        for layer in self._layers(size.skeleton):
            if layer.name in size.chains:
                held = tuple(each.to(self._device) for each in as_held(layer.chain, size.chains[layer.name]))
                is_trainable = size.skeleton.trainable.get(join(layer.name, "weight"), True)
                replacements |= chains_of(layer, held, trainable=is_trainable)
        return with_replaced(self.base, replacements)

    def _layers(self, skeleton: Skeleton) -> tuple[Layer, ...]:
        return tuple(
            Layer(
                stored.name,
                tuple(dict.fromkeys(map(self.base.get_submodule, stored.paths))),  # type: ignore[arg-type]
                stored.form,
                stored.shape,
                stored.chain,
            )
            for stored in skeleton.layers
        )

    @cached_property
    def _device(self) -> torch.device:
        return next((p.device for p in self.base.parameters() if not p.is_meta), torch.device("cpu"))

    def _fill_(self, skeleton: Skeleton, state: Mapping[str, Tensor | None]) -> None:
        """Give the model the file's parameters, buffers, flags and modes, or say in what it is another model."""
        slots = slots_of(self.base, persistent=True)
        misfit = _misfit(slots, skeleton, state)
        if misfit is not None:
            raise self._refused(misfit)
        if self.origin is not None and skeleton.built_by is not None and skeleton.built_by["is_changed"]:
            raise self._refused(None)
        moved: dict[int, Tensor] = {}  # what is one tensor stays one
        values = {key: moved.setdefault(id(t), t.to(self._device)) for key, t in state.items() if t is not None}
        first_keys: dict[int, str] = {}
        for key, tensor in values.items():
            first = slots[first_keys.setdefault(id(tensor), key)]
            if first is slots[key]:
                first.put(tensor)
            elif slots[key].tensor is not first.tensor:  # one in the file, two in the model
                setattr(slots[key].module, slots[key].name, first.tensor)
        for key, slot in slots.items():
            if key in values and slot.tensor.data_ptr() != values[key].data_ptr():
                raise self._refused(_differs(key, "a tensor of its own", "one that it shares with another layer"))
            if slot.is_parameter:
                slot.tensor.requires_grad_(skeleton.trainable[key])
        for key, slot in slots_of(self.base, persistent=False).items():
            if slot.tensor.is_meta:
                why = f"its buffer '{key}' is on the meta device and not in {self.path}"
                raise InvalidArgumentError.about("model", key, "a model whose buffers have values", why=why)
            if key in skeleton.dtypes and skeleton.dtypes[key] != slot.tensor.dtype:
                slot.put(slot.tensor.to(skeleton.dtypes[key]))
        others = set(skeleton.other_mode)
        for name, module in self.base.named_modules():
            module.training = skeleton.training != (name in others)

    def _refused(self, misfit: str | None) -> InvalidArgumentError:
        """Say in what the model is another one; without that, the file says itself that it is not what was built."""
        what = "" if misfit is None else one_line(f"it is not the one of {self.path}: {misfit}")
        if self.origin is None:
            return InvalidArgumentError.about("model", misfit, _SAME, why=what)
        return _model_needed(f"{self.path} was built by {self.origin}{what and f': {what}'}")


def _model_needed(why: str) -> ModelNeededError:
    return ModelNeededError.about("model", why, _SAME, f"model= is needed: {why}; allowed: {_SAME}")


def _misfit(slots: Mapping[str, TensorSlot], skeleton: Skeleton, state: Mapping[str, Tensor | None]) -> str | None:
    """Return the first layer, in the file's order, that the model has not or has in another shape; None for none."""
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
    """Return what the type is for: numbers to compute with are alike, of whatever precision."""
    return "float" if dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16) else str(dtype)


def _in_words(is_parameter: bool, shape: tuple[int, ...] | None) -> str:
    size = "no shape yet" if shape is None else f"shape {tuple(shape)}"
    return f"{'a parameter' if is_parameter else 'a buffer'} of {size}"


def _differs(key: str, in_file: str, in_model: str) -> str:
    layer, _, name = key.rpartition(".")
    return f"for '{name}' of layer '{layer}' the file has {in_file}, the model {in_model}"
