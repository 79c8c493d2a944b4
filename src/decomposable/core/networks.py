"""The full network of a model and a low-rank one of random size: how each of them is run, and its gradient taken.

Both share every parameter; only the low-rank one sees its weight matrices truncated. Nothing else is stored, and the
model itself is never touched. `joint.py` makes the paper's step of these passes, `elastic/` that of elastic training.

Several processes (`processes.py`) each bring a part of the batch: ∇_f and ∇ are averaged over them before ∇̂ is made of
∇, since that is not linear, and each SVD is made by one of them (`bases.py`).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decomposable.core.bases import KeptBases
from decomposable.core.criteria import Criterion, ScoresByLayer, find_criterion, scores_of
from decomposable.core.draws import DrawnRanks, cost_selector, draw_of, limits_of
from decomposable.core.forms import DEFAULT, Decomposition, FormOf, check_form
from decomposable.core.gradients import Gradient, by_parameter, mix, refuse_reentrant
from decomposable.core.layers import ChainLayers, FilterFn, Layer, avoid_fast_paths_, require_layers, source_of
from decomposable.core.lowrank import ChannelsLastProbe, LowRankLayer
from decomposable.core.passes import Local, LossSpec, Pass, Scaler, averaged
from decomposable.core.processes import Processes, same_buffers_
from decomposable.core.tracing import Forward, call_with_first, on_device_of
from decomposable.core.tree import clone_buffers_, data_parallel, refuse_sharded, rewire, unwrap
from decomposable.core.unpacked import layers_inside, opened_where_it_runs, with_layers
from decomposable_edge.checks import check_count, is_integer, is_number
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.chain import Rank, flat_ranks, like_ranks, ranks_of
from decomposable_edge.sizing.order import Limits
from decomposable_edge.text import first_line


class Losses(NamedTuple):
    """Hold what one step saw: which networks ran, their losses (detached), and the size of the low-rank one.

    `ratio` is the part of all bases that the low-rank network has: the Z that was drawn, or that of the plan for the
    budget that was drawn, of which `macs` and `params` say what part of the full network's it has. Where no low-rank
    network ran, `low` is NaN; where no full one ran, `full` is. With several processes the losses are the means over
    all of them.
    """

    ran: Literal["full", "low", "both"]
    full: Tensor
    low: Tensor
    ratio: float = math.nan
    macs: float = math.nan
    params: float = math.nan

    @property
    def loss(self) -> Tensor:
        """Return the loss of the network that ran; of both, the full one's."""
        return self.low if self.ran == "low" else self.full

    def seen(self) -> dict[str, Tensor | float]:
        """Return by name what there is: the losses of what ran, and the sizes of a low-rank network that are known."""
        full: dict[str, Tensor | float] = {} if self.ran == "low" else {"loss": self.full}
        if self.ran == "full":
            return full
        sizes = {"ratio": self.ratio, "macs": self.macs, "params": self.params}
        return {**full, "loss_low": self.low, **{name: size for name, size in sizes.items() if not math.isnan(size)}}

    @classmethod
    def of_full(cls, full: Tensor) -> Losses:
        """Return what a step of the full network alone saw."""
        return cls("full", full, torch.full_like(full, math.nan))

    @classmethod
    def of_low(cls, size: DrawnRanks, low: Tensor, full: Tensor | None = None) -> Losses:
        """Return what a step of the low-rank network saw, or of both."""
        sizes = (size.ratio, size.macs, size.params)
        return (
            cls("low", torch.full_like(low, math.nan), low, *sizes) if full is None else cls("both", full, low, *sizes)
        )


class TwoNetworks:
    """Run the full network of a model, and low-rank ones of sizes that are drawn; `JointObjective` lists the options.

    Attributes:
        layers: those that take part.
        skipped: the names of all others, each with a reason.
        sizes: how a size is drawn.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sizes: Mapping[str, Any],
        smallest_share: float = 0.0,
        form: FormOf = DEFAULT,
        criterion: str | Criterion | ScoresByLayer = "singular_value",
        min_rank: int = 1,
        limits: Limits | None = None,
        refresh: int = 1,
        filter_fn: FilterFn | None = None,
        seed: int | None = None,
        example_input: Any = None,
        forward: Forward | None = None,
        added_gap: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.refresh = check_count("refresh", refresh)
        if not is_number(added_gap) or not 0 <= added_gap < math.inf:
            raise InvalidArgumentError.about("added_gap", added_gap, "a number of at least 0")
        self.added_gap = float(added_gap)
        refuse_sharded(unwrap(model))
        call: Forward = forward or call_with_first
        closed: dict[str, str] = {}
        if example_input is not None:  # what `decompose` would leave closed is not trained otherwise
            batch = on_device_of(unwrap(model), example_input)
            _, filter_fn, closed = opened_where_it_runs(
                unwrap(model), check_form(form), filter_fn, batch, call, in_training=True
            )
        layers, skipped, self._opened, tree = layers_inside(unwrap(model), check_form(form), filter_fn)
        self.skipped = skipped | closed
        require_layers(layers, self.skipped)
        self.layers = layers
        self.criterion = criterion
        bounds = limits_of(layers, min_rank, limits)
        params_in_all = sum(p.numel() for p in unwrap(model).parameters())
        self.sizes = draw_of(
            sizes,
            smallest_share,
            layers,
            bounds,
            lambda: cost_selector(tree, layers, bounds, example_input, call, params_in_all),
        )
        self._chains = {module: ChainLayers(module, layer.chain) for layer in layers for module in layer.modules}
        # Its reducer waits for backward(), which is not called here: what it does is done here.
        wrapper = data_parallel(model)
        self.full_network = model if wrapper is None else wrapper.module
        self._has_own_buffers = wrapper is not None and not wrapper.broadcast_buffers
        group = wrapper.process_group if wrapper is not None and process_group is None else process_group
        self.processes = Processes.of(group, layers[0].weight.device)
        self._bases = KeptBases(layers, self.refresh, self.processes)
        if seed is not None and not is_integer(seed):
            raise InvalidArgumentError.about("seed", seed, "an int")
        self._generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else int(seed))
        self._layout = ChannelsLastProbe(layers)
        self._in_full: set[nn.Parameter] = set()  # what the last full pass had a gradient for
        self._has_warned = self._has_checked = self._has_met = False

    @property
    def criterion(self) -> Criterion | ScoresByLayer:
        """Return what bases are chosen by; another one may take its place between two steps."""
        return self._criterion

    @criterion.setter
    def criterion(self, criterion: str | Criterion | ScoresByLayer) -> None:
        found = find_criterion(criterion)
        if isinstance(found, Mapping):  # what does not fit is refused here, and not in the middle of a training
            for layer in self.layers:
                scores_of(found, layer.name, [np.zeros(rank) for rank in layer.full_ranks])
        self._criterion = found

    def meet(self) -> None:
        """Let the processes, once, compare their weights and take the first one's generator."""
        if not self._has_met:
            self.processes.check_same_(unwrap(self.model).named_parameters(), self._generator)
            self._has_met = True

    def draw(self) -> float:
        """Return the next Z or budget."""
        return self.sizes.draw(self._generator)

    def decompose(self) -> dict[str, Decomposition] | None:
        """Return the bases of the weights as they are; None, with a warning, where that failed."""
        try:
            return self._bases.of_current_weights()
        except torch.linalg.LinAlgError as error:
            warn_the_caller(f"the SVD failed, this step is an ordinary full-rank step: {error}")
            return None

    def select_ranks(self, decompositions: Mapping[str, Decomposition], drawn: float) -> dict[str, Rank]:
        """Return r_ℓ for every layer at a rank ratio Z, or within a budget (as a count) where budgets are drawn."""
        return dict(self._choose(decompositions, drawn).ranks)

    def _choose(self, decompositions: Mapping[str, Decomposition], drawn: float) -> DrawnRanks:
        spectra = [s for layer in self.layers for s in decompositions[layer.name].spectra]
        sigmas = torch.cat(spectra).cpu().double().numpy()
        sections = iter(np.split(sigmas, np.cumsum([len(s) for s in spectra])[:-1]))
        of_layers = ((layer.name, [next(sections) for _ in layer.full_ranks]) for layer in self.layers)
        found = [each for name, cuts in of_layers for each in scores_of(self.criterion, name, cuts)]
        # A cut's bases go in the order of their singular values; a criterion may rank them otherwise.
        scores = [np.sort(each)[::-1] for each in found]
        return self.sizes.choose(scores, drawn)

    def choose(self, decompositions: Mapping[str, Decomposition], drawn: float) -> DrawnRanks:
        """Return the first process's choice: a criterion of last bits, or of chance, may choose otherwise elsewhere."""
        size = self.processes.together(lambda: self._choose(decompositions, drawn))
        flat = flat_ranks(size.ranks)
        ratio, macs, params, *ranks = self.processes.from_first([size.ratio, size.macs, size.params, *flat])
        return DrawnRanks(like_ranks(size.ranks, map(int, ranks)), ratio, macs, params)

    def is_whole(self, size: DrawnRanks) -> bool:
        """Return whether nothing is cut off."""
        return all(size.ranks[layer.name] == layer.full_rank for layer in self.layers)

    def full_pass(self, call: LossSpec, scaler: Scaler | None) -> Pass:
        """Return the full network's loss and gradient."""
        if not self._has_own_buffers:
            same_buffers_(unwrap(self.model), self.processes)
        return self._averaged(call, lambda: self._differentiate(call, self.full_network, scaler))

    def low_rank_pass(
        self, call: LossSpec, scaler: Scaler | None, decompositions: Mapping[str, Decomposition], size: DrawnRanks
    ) -> Pass:
        """Return the low-rank network's loss and gradient."""
        network, layers = self._build_low_rank_network(decompositions, size.ranks)

        def run() -> Local:
            with self._layout.used_by(network):
                return self._differentiate(call, network, scaler)

        result = self._averaged(call, run)
        if call.samples != 0:
            self._check_used(layers)
        return result

    @torch.no_grad()
    def outputs_of_full(self, call: LossSpec) -> Any:
        """Return the full network's outputs, of a pass without gradients that leaves the model's buffers alone."""
        if call.samples == 0:
            return None
        teacher = rewire(unwrap(self.model), {})
        clone_buffers_(teacher)
        outputs = call.run(teacher)
        torch.clear_autocast_cache()  # of weights that were cast without a gradient, which the next pass would take
        return outputs

    def _averaged(self, call: LossSpec, run: Callable[[], Local]) -> Pass:
        """Return what a pass gives on average over the processes, by their samples; its gradient is on its way."""
        trainable = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        return averaged(run if call.samples != 0 else lambda: Local.nothing(trainable), trainable, self.processes)

    def _build_low_rank_network(
        self, decompositions: Mapping[str, Decomposition], ranks: Mapping[str, Rank]
    ) -> tuple[nn.Module, list[LowRankLayer]]:
        """Return the model with W̃ in place of W, and buffers of its own: the model keeps those of its full pass."""
        low: dict[nn.Module, nn.Module] = {}
        for layer in self.layers:
            rank, weights = ranks[layer.name], None  # where nothing is dropped, W̃ = W
            if rank != layer.full_rank:
                bases = decompositions[layer.name]
                weights = layer.numerics.truncate(layer.weight, bases, ranks_of(rank), self.added_gap)
            for module in layer.modules:
                low[module] = LowRankLayer(layer, self._chains[module], weights, self._layout)
        around = {module: with_layers(module, opened, low) for module, opened in self._opened.items()}
        network = rewire(unwrap(self.model), low | around)
        clone_buffers_(network)
        avoid_fast_paths_(network)
        return network, [layer for layer in low.values() if isinstance(layer, LowRankLayer)]

    def _differentiate(self, call: LossSpec, network: nn.Module, scaler: Scaler | None) -> Local:
        """Return the loss of one network, and its gradient for every trainable parameter."""
        outputs, samples = call.run_counted(network)
        loss = call.loss(outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgumentError(f"{call.name}: it returned {came}; allowed: a loss, one scalar tensor")
        parameters = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        if not loss.requires_grad or not parameters:
            raise InvalidArgumentError(
                f"{call.name}: its loss depends on no trainable parameter; allowed: one that does"
            )
        if not self._has_checked:
            refuse_reentrant(loss)
            self._has_checked = True
        weighted = loss if call.weight == 1 else loss * call.weight
        whole = weighted if scaler is None else scaler.scale(weighted)
        found = torch.autograd.grad(whole, parameters, allow_unused=True)
        gradient = dict(zip(parameters, found, strict=True))
        if network is self.full_network:
            self._in_full = {p for p, g in gradient.items() if g is not None}
        return Local(loss.detach(), gradient, samples)

    def _check_used(self, low_rank: list[LowRankLayer]) -> None:
        """Warn, once, where the second loss was not that of the low-rank network."""
        not_run = [layer for layer in low_rank if not layer.has_run]
        if self._has_warned or not not_run:
            return
        missed = [layer.name for layer in not_run if source_of(layer.layers.module)[0] in self._in_full]
        if len(not_run) == len(low_rank):
            text = (
                "the closure ignores the network it is given, so both losses are the full network's; "
                "use its argument: joint.backward(lambda net: loss(net(x), y))"
            )
        elif missed:
            text = (
                f"layer '{missed[0]}' ({len(missed)} in all) ran in the full-rank pass but not in the low-rank one: "
                "the model reaches it by a reference that is not a submodule; leave it out with filter_fn"
            )
        else:
            return
        self._has_warned = True
        warn_the_caller(text)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to repeat exactly.

        That is the generator of sizes, the bases where they are kept, and the scores of the bases where they are given.
        """
        state = {"generator": self._generator.get_state(), "bases": self._bases.state_dict()}
        if isinstance(self.criterion, Mapping):
            state["scores"] = {n: [torch.from_numpy(each) for each in cuts] for n, cuts in self.criterion.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same settings around the same model."""
        bases, generator, scores = KeptBases(self.layers, self.refresh, self.processes), torch.Generator(), None
        with refusing_states():  # all is read before anything changes
            bases.load_state_dict(state["bases"])
            generator.set_state(state["generator"].cpu())
            if "scores" in state:  # the order so far, which may have been found on the way
                scores = {name: [each.numpy() for each in cuts] for name, cuts in state["scores"].items()}
        if scores is not None:
            self.criterion = scores
        self._bases = bases
        self._generator.set_state(generator.get_state())


def mixed(full: Pass, low: Pass, balance: float, layers: Sequence[Layer]) -> Gradient:
    """Return (1 − λ) ∇_f + λ ∇̂."""
    decomposed, of_full, of_low = by_parameter(layers), full.gradient, low.gradient
    return {p: mix(of_full[p], of_low[p], balance, decomposed.get(p, ())) for p in of_full}


@contextmanager
def refusing_states() -> Iterator[None]:
    """Say that a state is not one of this object where reading it fails."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        came = f"{type(error).__name__}: {first_line(error)}"
        raise InvalidArgumentError.about("state", came, "what state_dict() returned") from error


def warn_the_caller(text: str) -> None:
    """Warn at the line outside of this package from which the step was made."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("decomposable."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def check_share(option: str, value: float) -> float:
    """Return a number from 0 to 1; refuse any other."""
    if not is_number(value) or not 0 <= value <= 1:
        raise InvalidArgumentError.about(option, value, "a number from 0 to 1")
    return float(value)
