"""Modules with several weights, or with a weight that lies otherwise, as plain `Linear` layers.

    nn.MultiheadAttention ─▶ q_proj, k_proj, v_proj, out_proj   nn.LSTM, GRU, RNN ─▶ ih_l0, hh_l0, …   Conv1D ─▶ Linear

Only `Linear` layers and convolutions are decomposed. A module with other weights is *opened*: another one takes its
place that computes the same with such layers. In training these are views of the module's own parameters; a decomposed
network has copies. Only there, layers whose weight is computed are *settled* (`computed.py`), and in layers with a
forward of their own a plain layer makes the one call (`calling.py`). `unpacked.py` does all that for a whole model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from decomposable.core.unpacking.attention import OpenedAttention
from decomposable.core.unpacking.computed import COMPUTED
from decomposable.core.unpacking.parts import Opened, PackedWeight, ParameterSlice
from decomposable.core.unpacking.recurrent import OpenedRecurrent

_KINDS: Mapping[type[nn.Module], type[Opened]] = {
    nn.MultiheadAttention: OpenedAttention,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), OpenedRecurrent),
}


def kind_of(module: nn.Module) -> type[Opened] | None:
    """Return what takes the place of a module with several weights; None for other modules."""
    return next((opened for kind, opened in _KINDS.items() if isinstance(module, kind)), None)


def can_be_opened(module: nn.Module) -> bool:
    """Return whether it is of a kind that is opened, and nothing is in the way."""
    kind = type(module)  # of GPT-2's `Conv1D`, a `Linear` whose weight lies transposed; known by name, not imported
    is_named = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return (is_named and "forward" not in vars(module)) or (kind_of(module) is not None and why_closed(module) is None)


def why_closed(module: nn.Module) -> str | None:
    """Return why a module with several weights is not opened; None for what can be, and for all other modules."""
    if kind_of(module) is None:
        return None
    if type(module) not in _KINDS or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "packed attention weights with add_bias_kv or add_zero_attn"
    weights = (part.owner._parameters.get(part.weight) for part in packed_weights(module))
    is_computed = not all(isinstance(weight, nn.Parameter) for weight in weights)
    return f"{COMPUTED}; remove that first" if is_computed else None


def packed_weights(module: nn.Module) -> list[PackedWeight]:
    """Return the weights of a module that can be opened."""
    kind = kind_of(module)
    if kind is not None:
        return list(kind.parts(module).values())
    return [PackedWeight(owner=module, weight="weight", bias="bias", cut=ParameterSlice(transposed=True))]
