"""What the parts of a network cost that no size makes smaller: its weights outside decomposed layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from decomposable.core.tracing import Trace, macs_left_alone
from decomposable.sizing.cost import LeftAlone
from decomposable.sizing.ranks import RankSelector


def parts_left_alone(model: nn.Module, names: Iterable[str], seen: Trace) -> tuple[LeftAlone, ...]:
    """The MACs and parameters of these modules, without their submodules; a weight that two hold is the first one's."""
    modules = dict(model.named_modules())
    held: dict[nn.Parameter, nn.Module] = {}
    for module in modules.values():
        for parameter in module._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                held.setdefault(parameter, module)
    params: dict[nn.Module, int] = {}
    for parameter, module in held.items():
        params[module] = params.get(module, 0) + parameter.numel()
    macs = macs_left_alone(seen)
    return tuple(
        LeftAlone(name=name, macs=seen.per_sample(macs.get(modules[name], 0)), params=params.get(modules[name], 0))
        for name in names
    )


def reasons_with_shares(
    skipped: Mapping[str, str], selector: RankSelector, not_counted: Sequence[str] | Mapping[str, str]
) -> dict[str, str]:
    """The reasons, each with the part of the network that is left alone for it."""
    macs, params = selector.full_cost("macs"), selector.full_cost("params")
    knows_macs = selector.fixed_macs is not None and macs > 0
    shares = {}
    for part in selector.left_alone:
        of_macs = "MACs not counted, " if part.name in not_counted else f"{part.macs / max(1, macs):.1%} of the MACs, "
        shares[part.name] = f"{of_macs if knows_macs else ''}{part.params / params:.1%} of the parameters"
    return {name: f"{reason}; {shares[name]}" for name, reason in skipped.items()}
