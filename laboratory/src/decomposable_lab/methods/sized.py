"""A trained network that has a list of sizes: what the methods make that do not end in the core's decomposition.

A file of one holds the tensors of the whole network, the batch normalisation statistics of its sizes, and the name of
the method, which makes the modules again from the model's code.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.tracing import call_with_first, on_device_of
from decomposable.core.tree import clone_buffers_, deep_copy, rewire
from decomposable.models.origin import built_by, is_patched
from decomposable.network.calibration.statistics import Row, averaged, tracked_batch_norms
from decomposable.network.file.container import FilePath, as_json, write_container
from decomposable.network.file.parsing import naming
from decomposable_edge.checks import is_number, only_one
from decomposable_edge.errors import ArtifactError, BudgetError, InvalidArgumentError
from decomposable_edge.fields import require

KIND = "sized"
"""What a file of such a network says that it holds."""


@dataclass(frozen=True, kw_only=True)
class MethodSize:
    """Hold one size of a network, and how its method calls it: a width, or a part of the ranks."""

    name: str  # such as "width 0.5"
    value: float  # what the method makes it from
    macs: int
    params: int
    full_macs: int
    full_params: int

    @property
    def macs_fraction(self) -> float:
        """Return MACs as a part of the original's."""
        return self.macs / self.full_macs

    @property
    def params_fraction(self) -> float:
        """Return parameters as a part of the original's."""
        return self.params / self.full_params

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.params:,} parameters ({self.params_fraction:.3f}x), {self.macs:,} MACs "
            f"({self.macs_fraction:.3f}x)"
        )


Build = Callable[[MethodSize], nn.Module]
"""The plain module of a size, with tensors of its own."""


class SizedNet(nn.Module):
    """Run a network at each of its sizes.

    Its parameters are not trainable, because they are copies of parts of what all sizes share: to train one size
    further, `extract` it.

    Attributes:
        module: the plain module of the current size.
        method: the name of the method that made it.
        sizes: all of them, the largest first.
        structure: what the method needs besides the model's code to make the modules again; JSON holds it.
        info: what a file that it was loaded from says besides; empty otherwise.
    """

    module: nn.Module
    _network: nn.Module

    def __init__(
        self,
        *,
        method: str,
        network: nn.Module,
        sizes: Sequence[MethodSize],
        build: Build,
        statistics: Mapping[float, Row] | None = None,
        structure: Mapping[str, Any] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.method = method
        self.sizes = tuple(sorted(sizes, key=lambda size: (-size.macs, -size.params)))
        self.structure, self.info = dict(structure or {}), dict(info or {})
        self.__dict__["_network"] = network  # not a submodule: what runs is `module`
        self._build = build
        self._statistics = dict(statistics or {})
        self.training = network.training
        self._take_(self.sizes[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network at the current size."""
        return self.module(*args, **kwargs)

    def resize_(
        self, plan: MethodSize | None = None, /, *, macs: float | None = None, params: float | None = None
    ) -> MethodSize:
        """Take one of `sizes`, or the largest within a budget: a float is a part of the original, an int above 1 a
        count.
        """
        if plan is None:
            return self._take_(self._within(macs=macs, params=params))
        if macs is not None or params is not None:
            raise InvalidArgumentError("resize_: got a plan and a budget; allowed: one of them")
        return self._take_(plan)

    def plan(self, *, macs: float | None = None, params: float | None = None) -> MethodSize:
        """Return what `resize_` would take for a budget; without one, the current size."""
        return self._plan if macs is None and params is None else self._within(macs=macs, params=params)

    def _within(self, *, macs: float | None, params: float | None) -> MethodSize:
        given = {name: value for name, value in (("macs", macs), ("params", params)) if value is not None}
        measure, budget = only_one(given, "resize_: give one of macs= and params=")
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
            raise InvalidArgumentError(f"{measure}={budget!r}; allowed: a part in (0, 1], or a count above 1")
        if isinstance(budget, float) and budget > 1:
            raise InvalidArgumentError(f"{measure}={budget!r}; allowed: a part in (0, 1], or an int above 1")
        limit = budget * getattr(self.sizes[0], f"full_{measure}") if budget <= 1 else budget
        fitting = [size for size in self.sizes if getattr(size, measure) <= limit * (1 + 1e-12)]
        if not fitting:
            least = min(self.sizes, key=lambda size: getattr(size, measure))
            cost = getattr(least, measure)
            part = math.ceil(1e4 * getattr(least, f"{measure}_fraction")) / 1e4  # up: it must be a budget that works
            raise BudgetError(f"{measure}={budget:g}; allowed: at least {cost:,} ({part:.4f}), its {least.name}")
        return max(fitting, key=lambda size: getattr(size, measure))

    @torch.inference_mode(False)  # a size made in that mode could not be used outside it
    def _take_(self, plan: MethodSize) -> MethodSize:
        if plan not in self.sizes:
            raise InvalidArgumentError(
                f"plan: {plan} is not one of this network's sizes; allowed: {', '.join(s.name for s in self.sizes)}"
            )
        module = self._build(plan)
        norms = tracked_batch_norms(module)
        for name, (mean, var) in self._statistics.get(plan.value, {}).items():
            if name not in norms or not mean.shape == var.shape == (norms[name].num_features,):
                raise ArtifactError(f"statistics: those of '{name}' at {plan.name} do not fit the network")
            for kind, value in (("running_mean", mean), ("running_var", var)):
                norms[name]._buffers[kind] = value.to(getattr(norms[name], kind).dtype, copy=True)
        self._trainable = {name: p.requires_grad for name, p in module.named_parameters()}
        self._modules["module"] = module.requires_grad_(False).train(self.training)
        self._plan = plan
        return plan

    def offered(self) -> list[tuple[float, MethodSize]]:
        """Return all sizes, each with its part of the MACs."""
        return [(round(size.macs_fraction, 4), size) for size in self.sizes]

    def extract(self) -> nn.Module:
        """Return the network at the current size, as a plain module with no tie to this one."""
        module = deep_copy(self.module)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self._trainable[name])
        return module

    def save(self, path: FilePath, info: Mapping[str, Any] | None = None) -> None:
        """Write all sizes to one file, which `load` reads; at once or not at all."""
        tensors = {f"state/{key}": tensor for key, tensor in self._network.state_dict().items()}
        for i, size in enumerate(self.sizes):
            for name, pair in self._statistics.get(size.value, {}).items():
                for kind, tensor in zip(("mean", "var"), pair, strict=True):
                    tensors[f"statistics/{i}/{name}/{kind}"] = tensor
        description = {
            "kind": KIND,
            "method": self.method,
            "built_by": _built_inside(self._network),
            "structure": as_json("structure", self.structure),
            "sizes": [asdict(size) for size in self.sizes],
            "size": self.sizes.index(self._plan),
            "training": self.training,
            "info": as_json("info", self.info if info is None else info),
        }
        write_container(path, description, tensors)

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse: the weights of one size are parts of those of all."""
        raise InvalidArgumentError(
            "load_state_dict: the sizes of this network share their weights; allowed: loading into what extract() gives"
        )

    def extra_repr(self) -> str:
        """Return the method, and the current size."""
        return f"{self.method}; {self._plan}; {len(self.sizes)} sizes"

    def _apply(self, fn: Any, recurse: bool = True) -> SizedNet:
        """Move or cast: the whole network, then the current size is made anew from it."""
        self._network._apply(fn)
        self._statistics = {
            v: {n: (fn(m), fn(s)) for n, (m, s) in rows.items()} for v, rows in self._statistics.items()
        }
        self._take_(self._plan)
        return self


def _built_inside(network: nn.Module) -> dict[str, Any] | None:
    """Return the note on the model that a method made a network of, for its file; the method says what it changed."""
    note = next((note for module in network.modules() if (note := built_by(module)) is not None), None)
    ours = ("torch", "decomposable", "decomposable_lab")  # who made a module what it is
    is_changed = any(is_patched(m) or type(m).__module__.partition(".")[0] not in ours for m in network.modules())
    return None if note is None else {**note, "is_changed": is_changed}


def batch_statistics(network: nn.Module, batches: Iterable[Any]) -> Row:
    """Return the mean and variance that every normalisation layer sees; the network stays as it is."""
    twin = rewire(network, {})
    clone_buffers_(twin)
    [row] = averaged([lambda: twin], lambda net, batch: call_with_first(net, on_device_of(net, batch)), batches)
    return row


def restored(
    path: FilePath, description: Mapping[str, Any], tensors: Mapping[str, Tensor], network: nn.Module, build: Build
) -> SizedNet:
    """Return the `SizedNet` of a file, around a network that the method has made again; its weights are replaced."""
    sizes = sizes_of(path, description)
    state = {key.removeprefix("state/"): t for key, t in tensors.items() if key.startswith("state/")}
    kinds = [{k: (t.shape, _kind(t)) for k, t in each.items()} for each in (state, network.state_dict())]
    if kinds[0] != kinds[1]:
        raise ArtifactError(f"{path}: its weights are not those of this model; allowed: the model that was trained")
    with naming(path):
        for key, kind in (("method", str), ("structure", dict), ("info", dict), ("training", bool), ("size", int)):
            require(isinstance(description.get(key), kind), f"{key} is {description.get(key)!r:.40}")
        require(0 <= description["size"] < len(sizes), f"size {description['size']} of {len(sizes)}")
    own = dict(itertools.chain(network.named_parameters(), network.named_buffers()))
    for (
        key,
        tensor,
    ) in state.items():  # each in the type of the file, such as bfloat16: the model's is not what was saved
        if key in own and own[key].dtype != tensor.dtype:
            own[key].data = own[key].data.to(tensor.dtype)
    network.load_state_dict(state)
    network.train(description["training"])
    statistics = _read_statistics(path, sizes, {k: t for k, t in tensors.items() if not k.startswith("state/")})
    given = {key: description[key] for key in ("method", "structure", "info")}
    try:
        net = SizedNet(network=network, sizes=sizes, build=build, statistics=statistics, **given)
        net.resize_(sizes[description["size"]])
        return net
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error


def _kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else str(tensor.dtype)


def sizes_of(path: FilePath, description: Mapping[str, Any]) -> list[MethodSize]:
    """Return the sizes that a file says it has; nothing in it is trusted."""
    entries = description.get("sizes")
    with naming(path):
        sizes = [_checked_size(entry) for entry in entries] if isinstance(entries, list) else []
        is_right = 0 < len(sizes) == len({size.value for size in sizes})
        require(is_right, "no sizes, or two that are one")
    return sizes


def _checked_size(entry: Any) -> MethodSize:
    counts = ("macs", "params", "full_macs", "full_params")
    is_right = (
        isinstance(entry, Mapping)
        and set(entry) == {"name", "value", *counts}
        and isinstance(entry["name"], str)
        and entry["name"].isprintable()
        and is_number(entry["value"])
        and 0 < entry["value"] <= 1
        and all(type(entry[key]) is int and 0 < entry[key] < 1 << 62 for key in counts)
    )
    require(is_right, f"a size is {entry!r:.80}")
    return MethodSize(**entry)


def _read_statistics(path: FilePath, sizes: Sequence[MethodSize], tensors: Mapping[str, Tensor]) -> dict[float, Row]:
    """Return the statistics of every size, from tensors called statistics/NUMBER/LAYER/mean and …/var."""
    found: dict[float, Row] = {}
    for key in tensors:
        parts = re.fullmatch(r"(statistics/([0-9]{1,9})/(.*)/)(mean|var)", key, re.DOTALL)
        mean, var = (tensors.get(f"{parts[1]}{kind}") if parts else None for kind in ("mean", "var"))
        if parts is None or int(parts[2]) >= len(sizes) or mean is None or var is None:
            raise ArtifactError(f"{path}: it holds a tensor {key!r:.80} that it should not")
        if not (var.is_floating_point() and mean.is_floating_point() and (var >= 0).all()):
            raise ArtifactError(f"{path}: the variance {key!r:.80} is not one")
        found.setdefault(sizes[int(parts[2])].value, {})[parts[3]] = (mean, var)
    return found
