"""One training step of the joint full- and low-rank objective: Algorithm 1 of the paper.

                 ┌─ full-rank network, W ────────────────→ loss ─→ ∇_f ───────────────────────────┐
    one batch ───┤                                                                                ├─→ .grad
                 └─ low-rank network, W̃ = truncate(W) ───→ loss ─→ ∇ (back through the SVD) ─→ ∇̂ ┘

    .grad += (1 − λ) ∇_f + λ ∇̂      with ∇̂ = ∇ · ‖∇_f‖/‖∇‖ for each decomposed weight, ∇̂ = ∇ for all else

Both networks share every parameter; only the low-rank one sees its weight matrices truncated, to ranks that a random
ratio Z of all the bases of the network allows. Nothing else is stored, and the model itself is never touched.

Three options go beyond the paper: a budget is drawn in place of Z (`draws.py`), the low-rank network learns from the
full one's outputs (`distillation.py`), and the two networks take turns, so that a step is one pass:

    step 1, 3, 5, …:  .grad += 2 (1 − λ) ∇_f      step 2, 4, 6, …:  .grad += 2 λ ∇̂, with a running mean of ‖∇_f‖

or, with `turns=3`, three low-rank steps after each full one.

Several processes (`processes.py`) each bring a part of the batch: ∇_f and ∇ are averaged over them before ∇̂ is made of
∇, since that is not linear, and each SVD is made by one of them (`bases.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decomposable.core.bases import KeptBases
from decomposable.core.criteria import Criterion, ScoresByLayer, find_criterion, scores_of
from decomposable.core.distillation import Distance, check_distance, detached
from decomposable.core.draws import DrawnRanks, DrawRatio, Range, cost_selector, draw_of, limits_of
from decomposable.core.forms import DEFAULT, Decomposition, FormOf, check_form
from decomposable.core.gradients import Gradient, RunningNorms, accumulate, by_parameter, mix, refuse_reentrant, scaled
from decomposable.core.layers import ChainLayers, FilterFn, avoid_fast_paths_, require_layers, source_of
from decomposable.core.lowrank import ChannelsLastProbe, LowRankLayer
from decomposable.core.passes import Closure, Local, LossSpec, Pass, Scaler, averaged
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
    """Hold what one step saw: the two losses (detached), and the size of the low-rank network.

    `ratio` is the rank ratio Z that was drawn, or that of the plan for the budget that was drawn, of which `macs` and
    `params` say what part of the full network's it has. Of a network that had no pass (with balance=0, or when it is
    the other's turn) the loss is NaN. Where an SVD failed the step is a full-rank one: `low` is `full` and `ratio` is
    1, or with turns both are NaN. With several processes the losses are the means over all of them.
    """

    full: Tensor
    low: Tensor
    ratio: float
    macs: float = math.nan
    params: float = math.nan


class JointObjective:
    """Train a model, which stays as it is, by the joint objective (equation 1 and Algorithm 1).

    Args:
        model: any module; compiled ones and `DistributedDataParallel` too. Its parameters keep their names, any
            optimiser can step them.
        form: how convolutions become chains of layers, "spatial", "channel" or "tucker"; or by name pattern, the first
            that matches, as in ``{"layer4.*": "tucker", "*": "spatial"}``.
        ratio: (α_l, α_u), between which Z is drawn in every step, by default (0.01, 0.5); one number keeps Z fixed.
        balance: λ, the weight of the low-rank loss; 0 is plain training and skips the low-rank pass.
        criterion: "singular_value", "energy", "uniform", a function from singular values to scores, or scores that stay
            as they are, by layer: the `scores` of a network that `decompose` has ordered by data.
        min_rank: the smallest rank of any layer (the authors' code uses 5).
        limits: smallest and largest rank by name pattern, such as ``{"layer4.*": (8, None)}``.
        refresh: decompose every this many steps; in between, W is projected onto the bases kept. 1 is the paper's.
        filter_fn: ``filter_fn(module, name)`` says which layers take part; `skipped` names the others with a reason.
        seed: of the generator of Z; by default torch's initial seed.
        added_gap: a constant that is added to σ_i² − σ_k² in the gradient, in place of clipping σ_k/σ_i (appendix A,
            where the paper shows why not).
        process_group: the processes that train this model together; by default the group of its
            `DistributedDataParallel`, or all processes of torch.distributed (docs/machines.md).

    Beyond the paper (docs/training.md says what each is worth):
        macs, params: in place of `ratio`, budgets as in ``resize_``, between which one is drawn log-uniformly; the
            low-rank network is the very one that ``resize_`` would make for it.
        example_input, forward: as in `decompose`: a batch that tells the sizes of the feature maps, for `macs`, and
            ``forward(net, batch)`` where calling ``net`` with its first entry is not right.
        smallest: the share of steps in which the smallest budget is taken.
        distill: d in the low-rank loss (1 − d) · loss + d · KL(full ‖ low), with the full network's outputs detached.
        distance: ``distance(low, full)`` of the outputs in place of the KL divergence of their softmax.
        turns: one of the two networks in each call of `backward`, the full one first: about the price of a plain step.
            A number is that of low-rank calls after each full one; True is 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> joint = JointObjective(model, ratio=(0.1, 0.5))
        >>> x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
        >>> losses = joint.backward(lambda net: nn.functional.cross_entropy(net(x), y))
        >>> model[0].weight.grad.shape, 0.1 <= losses.ratio <= 0.5
        (torch.Size([16, 8]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        form: FormOf = DEFAULT,
        ratio: Range | float | None = None,
        balance: float = 0.5,
        criterion: str | Criterion | ScoresByLayer = "singular_value",
        min_rank: int = 1,
        limits: Limits | None = None,
        refresh: int = 1,
        filter_fn: FilterFn | None = None,
        seed: int | None = None,
        macs: Range | float | None = None,
        params: Range | float | None = None,
        example_input: Any = None,
        forward: Forward | None = None,
        smallest: float = 0.0,
        distill: float = 0.0,
        distance: Distance | None = None,
        turns: bool | int = False,
        added_gap: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.balance, self.distill = _check_share("balance", balance), _check_share("distill", distill)
        self.refresh = check_count("refresh", refresh)
        if not is_number(added_gap) or not 0 <= added_gap < math.inf:
            raise InvalidArgumentError.about("added_gap", added_gap, "a number of at least 0")
        self.added_gap = float(added_gap)
        if not isinstance(turns, bool) and (not is_integer(turns) or turns < 1):
            raise InvalidArgumentError.about("turns", turns, "True, False or an int of at least 1")
        self.turns = int(turns)
        self.distance = check_distance(distance, self.distill)
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
            {"ratio": ratio, "macs": macs, "params": params},
            smallest,
            layers,
            bounds,
            lambda: cost_selector(tree, layers, bounds, example_input, call, params_in_all),
        )
        self._chains = {module: ChainLayers(module, layer.chain) for layer in layers for module in layer.modules}
        # Its reducer waits for backward(), which is not called here: what it does is done here.
        wrapper = data_parallel(model)
        self._full_network = model if wrapper is None else wrapper.module
        self._has_own_buffers = wrapper is not None and not wrapper.broadcast_buffers
        group = wrapper.process_group if wrapper is not None and process_group is None else process_group
        self._processes = Processes.of(group, layers[0].weight.device)
        self._bases = KeptBases(layers, self.refresh, self._processes)
        if seed is not None and not is_integer(seed):
            raise InvalidArgumentError.about("seed", seed, "an int")
        self._generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else int(seed))
        self._layout = ChannelsLastProbe(layers)
        self._norms = RunningNorms(layers)
        self._low_turns_left = 0  # until the full network's next
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

    def backward(
        self,
        closure: Closure | None = None,
        scaler: Scaler | None = None,
        *,
        forward: Callable[[nn.Module], Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        weight: float = 1.0,
        samples: int | None = None,
    ) -> Losses:
        """Compute both losses of one batch and add the joint gradient to every parameter's `.grad`.

        `closure(net)` returns the loss of the network it is given; it is called with the model and with its low-rank
        network, so everything else in it (the batch, the labels) is the same for both. A `GradScaler` is passed here;
        step and update it as usual. The gradient is multiplied with `weight`: 1/n for the mean of n calls.

        With `distill`, outputs and loss are told apart: ``backward(forward=lambda net: net(x), loss=lambda out: ...)``.

        With several processes, all of them call this equally often. The mean of their gradients is by how many
        `samples` each has, by default the length of the network's first input. One that has none this time says
        ``samples=0``; its closure is not called.
        """
        call = self._call(closure, forward, loss, weight=weight, samples=samples)
        self._meet()
        if self.turns and self.balance > 0:
            full_share = 2 * (1 - self.balance)
            is_low = self._low_turns_left > 0
            losses = self._low_turn(call, scaler) if is_low else self._full_turn(call, scaler, full_share)
            self._low_turns_left = self._low_turns_left - 1 if is_low else self.turns
            return losses

        drawn = self.sizes.draw(self._generator)
        full = self._full_pass(call, scaler)
        absent = torch.full_like(full.loss, math.nan)
        if self.balance == 0:
            accumulate(scaled(full.gradient, 1.0))
            return Losses(full.loss, absent, drawn if isinstance(self.sizes, DrawRatio) else math.nan)
        decompositions = self._decompose()
        if decompositions is None:
            accumulate(scaled(full.gradient, 1.0))
            return Losses(full.loss, full.loss, 1.0)

        size = self._choose_for_all(decompositions, drawn)
        low = self._low_rank_pass(call, scaler, decompositions, size, full.outputs)
        layers = by_parameter(self.layers)
        gradient_full, gradient_low = full.gradient, low.gradient
        accumulate(
            {
                parameter: mix(
                    gradient_full[parameter], gradient_low[parameter], self.balance, layers.get(parameter, ())
                )
                for parameter in gradient_full
            }
        )
        return Losses(full.loss, low.loss, size.ratio, size.macs, size.params)

    def gradients(
        self,
        closure: Closure | None = None,
        *,
        forward: Callable[[nn.Module], Any] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        samples: int | None = None,
    ) -> tuple[Gradient, Gradient]:
        """Return ∇_f and ∇ of one batch at the next size drawn, neither mixed nor rebalanced; no `.grad` changes."""
        call = self._call(closure, forward, loss, weight=1.0, samples=samples)
        self._meet()
        drawn = self.sizes.draw(self._generator)
        full = self._full_pass(call, None)
        decompositions = self._bases.of_current_weights()
        size = self._choose_for_all(decompositions, drawn)
        return full.gradient, self._low_rank_pass(call, None, decompositions, size, full.outputs).gradient

    def _call(self, *how: Any, weight: float, samples: int | None) -> LossSpec:
        is_alone = self._processes.is_alone
        return LossSpec.of(*how, weight=weight, samples=samples, distill=self.distill, is_alone=is_alone)

    def _full_turn(self, call: LossSpec, scaler: Scaler | None, share: float) -> Losses:
        """Add 2 (1 − λ) ∇_f, or another share of it."""
        full = self._full_pass(call, scaler)
        self._norms.update(full.gradient, call.scale(scaler, full.loss))
        accumulate(scaled(full.gradient, share))
        return Losses(full.loss, torch.full_like(full.loss, math.nan), math.nan)

    def _low_turn(self, call: LossSpec, scaler: Scaler | None) -> Losses:
        """Add 2 λ ∇̂."""
        drawn = self.sizes.draw(self._generator)
        decompositions = self._decompose()
        if decompositions is None:
            return self._full_turn(call, scaler, 1.0)
        size = self._choose_for_all(decompositions, drawn)
        learns = self.distill > 0 and not self._is_whole(size)
        taught = self._processes.together(lambda: self._teach(call)) if learns else None
        low = self._low_rank_pass(call, scaler, decompositions, size, taught)
        accumulate(self._norms.rebalanced(low.gradient, 2 * self.balance, call.scale(scaler, low.loss)))
        return Losses(torch.full_like(low.loss, math.nan), low.loss, size.ratio, size.macs, size.params)

    def _is_whole(self, size: DrawnRanks) -> bool:
        """Return whether nothing is cut off: the full network has nothing to teach itself, its labels have."""
        return all(size.ranks[layer.name] == layer.full_rank for layer in self.layers)

    @torch.no_grad()
    def _teach(self, call: LossSpec) -> Any:
        """Return the full network's outputs, of a pass without gradients that leaves the model's buffers alone."""
        if call.samples == 0:
            return None
        teacher = rewire(unwrap(self.model), {})
        clone_buffers_(teacher)
        outputs = call.run(teacher)
        torch.clear_autocast_cache()  # of weights that were cast without a gradient, which the next pass would take
        return outputs

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

    def _choose_for_all(self, decompositions: Mapping[str, Decomposition], drawn: float) -> DrawnRanks:
        """Return the first process's choice: a criterion of last bits, or of chance, may choose otherwise elsewhere."""
        size = self._processes.together(lambda: self._choose(decompositions, drawn))
        flat = flat_ranks(size.ranks)
        ratio, macs, params, *ranks = self._processes.from_first([size.ratio, size.macs, size.params, *flat])
        return DrawnRanks(like_ranks(size.ranks, map(int, ranks)), ratio, macs, params)

    def _meet(self) -> None:
        """Let the processes, once, compare their weights and take the first one's generator."""
        if not self._has_met:
            self._processes.check_same_(unwrap(self.model).named_parameters(), self._generator)
            self._has_met = True

    def _decompose(self) -> dict[str, Decomposition] | None:
        """Return the bases of the weights as they are; None, with a warning, where that failed."""
        try:
            return self._bases.of_current_weights()
        except torch.linalg.LinAlgError as error:
            warnings.warn(
                f"the SVD failed, this step is an ordinary full-rank step: {error}", stacklevel=3 + bool(self.turns)
            )
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to repeat exactly.

        That is the generator of sizes and, where they are kept, the bases; whose turn it is, and the norms of the
        gradients so far; the scores of the bases, where these are given.
        """
        state = {"generator": self._generator.get_state(), "bases": self._bases.state_dict()}
        if self.turns:
            state["turn"] = {"low": self._low_turns_left, "norms": self._norms.state_dict()}
        if isinstance(self.criterion, Mapping):
            state["scores"] = {n: [torch.from_numpy(each) for each in cuts] for n, cuts in self.criterion.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of an objective with the same settings around the same model."""
        bases = KeptBases(self.layers, self.refresh, self._processes)
        norms, generator, left, scores = RunningNorms(self.layers), torch.Generator(), 0, None
        try:  # all is read before anything changes
            bases.load_state_dict(state["bases"])
            generator.set_state(state["generator"].cpu())
            if self.turns:
                left = state["turn"]["low"]
                norms.load_state_dict(state["turn"]["norms"])
            if "scores" in state:  # the order so far, which may have been found on the way
                scores = {name: [each.numpy() for each in cuts] for name, cuts in state["scores"].items()}
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            came = f"{type(error).__name__}: {first_line(error)}"
            raise InvalidArgumentError.about("state", came, "what state_dict() returned") from error
        if not isinstance(left, int) or left < 0:  # a bool in older states
            raise InvalidArgumentError.about("state", f"turn {left!r:.40}", "what state_dict() returned")
        if scores is not None:
            self.criterion = scores
        self._bases, self._norms, self._low_turns_left = bases, norms, int(left)
        self._generator.set_state(generator.get_state())

    def _low_rank_pass(
        self,
        call: LossSpec,
        scaler: Scaler | None,
        decompositions: Mapping[str, Decomposition],
        size: DrawnRanks,
        taught: Any,
    ) -> Pass:
        """Return the low-rank network's loss and gradient; `taught` are the full one's outputs, where they count."""
        network, layers = self._build_low_rank_network(decompositions, size.ranks)

        def run() -> Local:
            with self._layout.used_by(network):
                return self._differentiate(call, network, scaler, None if self._is_whole(size) else taught)

        result = self._averaged(call, run)
        if call.samples != 0:
            self._check_used(layers)
        return result

    def _full_pass(self, call: LossSpec, scaler: Scaler | None) -> Pass:
        """Return the full network's loss and gradient."""
        if not self._has_own_buffers:
            same_buffers_(unwrap(self.model), self._processes)
        return self._averaged(call, lambda: self._differentiate(call, self._full_network, scaler))

    def _averaged(self, call: LossSpec, run: Callable[[], Local]) -> Pass:
        """Return what a pass gives on average over the processes, by their samples; its gradient is on its way."""
        trainable = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        return averaged(run if call.samples != 0 else lambda: Local.nothing(trainable), trainable, self._processes)

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

    def _differentiate(self, call: LossSpec, network: nn.Module, scaler: Scaler | None, taught: Any = None) -> Local:
        """Return the loss of one network, and its gradient for every trainable parameter."""
        outputs, samples = call.run_counted(network)
        is_distilled = taught is not None and self.distill > 0
        loss, name = (
            (self._distilled(call, outputs, taught), "distance") if is_distilled else (call.loss(outputs), call.name)
        )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgumentError(f"{name}: it returned {came}; allowed: a loss, one scalar tensor")
        parameters = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        if not loss.requires_grad or not parameters:
            raise InvalidArgumentError(f"{name}: its loss depends on no trainable parameter; allowed: one that does")
        if not self._has_checked:
            refuse_reentrant(loss)
            self._has_checked = True
        weighted = loss if call.weight == 1 else loss * call.weight
        whole = weighted if scaler is None else scaler.scale(weighted)
        found = torch.autograd.grad(whole, parameters, allow_unused=True)
        gradient = dict(zip(parameters, found, strict=True))
        if network is self._full_network:
            self._in_full = {p for p, g in gradient.items() if g is not None}
        return Local(loss.detach(), gradient, detached(outputs) if self.distill else None, samples)

    def _distilled(self, call: LossSpec, outputs: Any, taught: Any) -> Tensor:
        """Return (1 − d) · loss + d · KL(full ‖ low)."""
        distance = self.distance(outputs, taught)
        if not isinstance(distance, Tensor):
            raise InvalidArgumentError(
                f"distance: it returned {type(distance).__name__}; allowed: a loss, one scalar tensor"
            )
        return distance if self.distill == 1 else (1 - self.distill) * call.loss(outputs) + self.distill * distance

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
        warnings.warn(text, stacklevel=4 + bool(self.turns))


def _check_share(option: str, value: float) -> float:
    if not is_number(value) or not 0 <= value <= 1:
        raise InvalidArgumentError.about(option, value, "a number from 0 to 1")
    return float(value)
