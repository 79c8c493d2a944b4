"""Products of two activations, as those inside attention: q kᵀ and weights · v. No size makes them smaller.

They are seen where a pass computes them, below all of PyTorch's functions: a matrix product of which neither side lies
where a parameter or a buffer does, while no layer runs that is counted by its weight.

    scores q kᵀ:  samples · heads · queries · keys · width      weights · v:  the same, with the width of v
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_FACTORS = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2)}  # where the two sides are
_ATTENTION = "_scaled_dot_product"  # how the kernels of attention begin, whichever of them a machine takes


class Products(TorchDispatchMode):
    """In a pass inside: the MACs of such products, by the module that computes them.

    Whoever runs the pass tells which module runs, by `enter` and `leave`; of those that are `counted` by their weights
    nothing is seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `probing.py`

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.macs: Counter[nn.Module] = Counter()
        held = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()))
        self._held = {_place(t) for t in held if t is not None}
        self._running: list[tuple[nn.Module, bool]] = [(model, False)]

    def enter(self, module: nn.Module, counted: bool) -> None:
        """From now on this one runs."""
        self._running.append((module, counted))

    def leave(self) -> None:
        """The one that runs is done."""
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        module, is_counted = self._running[-1]
        if not is_counted:
            macs = self._macs(getattr(func, "overloadpacket", None), args)
            if macs:
                self.macs[module] += macs
        return found

    def _macs(self, operation: Any, args: Any) -> int:
        if operation in _FACTORS:
            one, other = (args[i] for i in _FACTORS[operation])
            if _place(one) in self._held or _place(other) in self._held:
                return 0
            return int(one.numel()) * int(other.shape[-1])
        if operation is not None and operation.__name__.startswith(_ATTENTION) and len(args) >= 3:
            query, key, value = args[:3]
            if all(isinstance(each, Tensor) and each.dim() == 4 for each in (query, key, value)):
                return int(query.shape[:-1].numel()) * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])
        return 0


def _place(value: Any) -> int:
    """Where the memory begins that a tensor is in, the same for all its views; 0 for what has none."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
        return 0
    try:
        return value.untyped_storage().data_ptr() or -1
    except (RuntimeError, NotImplementedError):  # kinds of tensor that hold others, or nothing
        return 0
