"""Which layers a chain can stand in for, found by running the model.

    one pass of the full network    a weight that is used other than by calling its layer
    one of the smallest             a model that fails with factors in a layer's place, or does not call them

A model's code can do anything with its layers, so this is not read from it but seen. Afterwards random numbers and
buffers are as before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decomposable.core.factors import Factors, as_held
from decomposable.core.layers import Layer, laid_out
from decomposable.core.standin import WITHOUT_VALUES
from decomposable.core.tracing import Forward
from decomposable.core.tree import clone_buffers_, undisturbed
from decomposable.network.original import chains_of, with_replaced
from decomposable.network.parts import mapped, sliced
from decomposable_edge.sizing.chain import Ranks, in_words


class WeightsUsedElsewhere(TorchDispatchMode):
    """In a pass inside: sees every operation, and whether a weight takes part in it while its layer is not running.

    `used` are those layers, each with the reason. Asking for a weight's type or shape is no operation.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler, more than a second, to keep it from compiling this

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.used: dict[str, str] = {}
        self._modules = [module for layer in layers for module in layer.modules]
        self._names = {_pointer(layer.weight): layer.name for layer in layers}
        self._names.pop(0, None)
        self._running: list[int] = []

    def __enter__(self) -> WeightsUsedElsewhere:
        for module in self._modules:  # the model's own copy; a plain layer has no `forward` of its own there
            module.__dict__["forward"] = self._noting(module)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for module in self._modules:
            del module.__dict__["forward"]

    def _noting(self, module: nn.Module) -> Callable[..., Any]:
        """Return the layer's forward, during which its weight may be used."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._running.append(_pointer(module._parameters["weight"]))
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        uses_values = getattr(func, "overloadpacket", None) not in WITHOUT_VALUES
        for value in tree_leaves((args, kwargs)) if uses_values else ():
            pointer = _pointer(value)
            if pointer in self._names and pointer not in self._running:
                name = str(func).split(".")[1] if "." in str(func) else str(func)
                self.used.setdefault(self._names[pointer], f"its weight is used other than by calling it ({name})")
        return func(*args, **(kwargs or {}))


def _pointer(value: Any) -> int:
    """Return where a tensor's numbers lie, by which a view of a weight is known, too; 0 for what has no such place."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.layout != torch.strided:
        return 0
    try:
        return value.data_ptr()
    except RuntimeError:  # kinds of tensor that hold others
        return 0


class _Outcome(NamedTuple):
    """Of a pass: what the model raised, and the names of the layers whose stand-ins it called."""

    error: Exception | None
    called: set[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """Passes of the model with factors in place of its layers; `ranks` are the smallest, by name."""

    base: nn.Module
    layers: tuple[Layer, ...]
    factors: dict[str, Factors]
    ranks: Mapping[str, Ranks]
    example: Any
    forward: Forward

    def judge(self, called: Container[nn.Module]) -> tuple[dict[str, Factors], dict[str, str]]:
        """Return the factors in the layout to keep them in, and the layers that cannot be replaced, with the reasons.

        On a CPU thin convolutions are faster with channels last, but a model that calls `.view` on a feature map cannot
        run so. `called` are the modules that the full network calls. Where the model fails without any factors, too,
        its error is raised.
        """
        with undisturbed(self.base):
            fast = self
            if next(self.base.parameters()).device.type == "cpu":
                fast = replace(self, factors=mapped(lambda w: laid_out(w, torch.channels_last), self.factors))
            outcome = fast._run(self.layers)
            if outcome.error is None:
                return fast.factors, fast._passed_over(self.layers, called, outcome.called)
            left, reasons, outcome = self._without_failing()
            keeps_layout = not reasons or fast._run(left).error is not None
            reasons |= self._passed_over(left, called, outcome.called)
            return (self if keeps_layout else fast).factors, reasons

    def _without_failing(self) -> tuple[list[Layer], dict[str, str], _Outcome]:
        """Return the layers with which the model runs when they are replaced, and why it does not with the others."""
        reasons: dict[str, str] = {}
        left = list(self.layers)
        while (outcome := self._run(left)).error is not None:
            runs, fails, error = 0, len(left), outcome.error  # with so many of the first ones replaced
            while fails - runs > 1:
                middle = (runs + fails) // 2
                failed = self._run(left[:middle]).error
                runs, fails, error = (middle, fails, error) if failed is None else (runs, middle, failed)
            if runs == 0 and (unchanged := self._run([]).error) is not None:
                raise unchanged
            failing = left.pop(fails - 1)
            reasons[failing.name] = f"the model fails with {in_words(failing.full_rank)} in its place ({_line(error)})"
        return left, reasons, outcome

    def _passed_over(self, layers: Sequence[Layer], called: Container[nn.Module], now: set[str]) -> dict[str, str]:
        """Return the layers that the full network calls, but not the network with factors, which calls those in `now`.

        At the smallest size other numbers may lead the model another way; with all bases they cannot.
        """
        missed = [x for x in layers if x.name not in now and any(module in called for module in x.modules)]
        if missed:
            now = self._run(layers, smallest=False).called
        left = [layer for layer in missed if layer.name not in now]
        return {x.name: f"the model calls it, but not the {in_words(x.full_rank)} in its place" for x in left}

    @torch.no_grad()
    def _run(self, replaced: Sequence[Layer], *, smallest: bool = True) -> _Outcome:
        replacements: dict[nn.Module, nn.Module] = {}
        called: set[str] = set()
        for layer in replaced:
            factors = self.factors[layer.name]
            factors = sliced(factors, self.ranks[layer.name]) if smallest else factors
            chains = chains_of(layer, as_held(layer.chain, factors))
            for chain in chains.values():
                chain.register_forward_pre_hook(lambda *_, name=layer.name: called.add(name))
            replacements |= chains
        network = with_replaced(self.base, replacements)
        clone_buffers_(network)
        try:
            self.forward(network.eval(), self.example)
        except Exception as error:  # in whatever words a model refuses
            return _Outcome(error, called)
        return _Outcome(None, called)


def _line(error: Exception) -> str:
    """Return the error in a line, that of the model where one of ours tells of it."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:160]}" + ("…" if len(text) > 160 else "")
