"""Ways to draw and teach the low-rank network, tried on a pretrained ResNet-20 and judged on held-out training images.

One run is one row: a short training with the options given, then accuracy at some sizes on 5,000 training images that
it never saw. The test set plays no part. Rows go to results/benchmarks.jsonl as `elastic`.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from _cifar import accuracy, add_options, augment, load_cifar10, pretrained_resnet20
from _common import record
from torch import nn

import decomposable as dn
from decomposable.core import gradients
from decomposable.core import svd as svd_module
from decomposable.core.bases import KeptBases
from decomposable.core.distillation import kl_divergence
from decomposable.core.draws import DrawRatio
from decomposable.core.forms import FORMS, MatrixForm, to_matrix
from decomposable.core.metric import DAMPING
from decomposable.core.moments import second_moments
from decomposable.core.networks import TwoNetworks
from decomposable.core.svd import svd, truncate
from decomposable.elastic import ElasticOptions
from decomposable.network.goals import drawn_loss
from decomposable.training.loop import parameter_groups

SIZES = (1.0, 0.5, 0.35, 0.25, 0.2, 0.15, 0.1, 0.07)
HELD_OUT = 5000
EXAMPLE = torch.zeros(1, 3, 32, 32)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--name", required=True, help="of this row")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--ratio", type=float, nargs=2, help="the paper's Z, in place of budgets")
    parser.add_argument("--macs", type=float, nargs=2, default=(0.06, 0.7))
    parser.add_argument("--smallest", type=float, default=0.0)
    parser.add_argument("--distill", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the softmax of teacher and pupil")
    parser.add_argument("--no-turns", dest="turns", action="store_false")
    parser.add_argument("--low-turns", type=int, default=1, help="low-rank steps after each full one, with turns")
    parser.add_argument("--even-from", type=float, default=1.0, help="the part of the training after which it is one")
    parser.add_argument("--balance", type=float, default=0.5)
    parser.add_argument("--refresh", type=int, default=8)
    parser.add_argument("--turned", type=float, help="refresh a layer once this part of WᵀW left the diagonal")
    parser.add_argument("--at-most", action="store_true", help="a low-rank gradient is made smaller, and never larger")
    parser.add_argument("--all-norms", action="store_true", help="scale the gradients of γ, β and biases, too")
    parser.add_argument("--late", type=float, default=0.0, help="the part of the training without low-rank passes")
    parser.add_argument("--score", choices=("sigma", "norm", "mac"), default="sigma")
    parser.add_argument("--ladder", action="store_true", help="ranks by an order that 1,000 images give at the start")
    parser.add_argument("--metric", action="store_true", help="cut in the metric of 1,000 images, as cuts by data are")
    parser.add_argument("--clip", type=float, help="δ² in place of the paper's 0.99, at which ρ² is clipped")
    parser.add_argument("--average", type=float, default=0.0, help="decay of a moving average of the weights")
    parser.add_argument("--average-teaches", action="store_true")
    parser.add_argument("--teacher-eval", action="store_true", help="the teacher in eval mode")
    parser.add_argument("--plain", action="store_true", help="no low-rank network at all")
    parser.add_argument("--tune", type=float, nargs="+", metavar="SIZE", help="then tune these, and measure again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    return parser.parse_args()


class Weighted:
    """Scores of each layer times a number, in training and afterwards."""

    def __init__(self, joint: TwoNetworks, kind: str) -> None:
        self.joint, self.kind, self.sizes = joint, kind, joint.sizes

    def draw(self, generator):
        return self.sizes.draw(generator)

    def choose(self, scores, drawn):
        return self.sizes.choose(self.weighted(scores), drawn)

    def weighted(self, scores):
        weights = self.of_norms() if self.kind == "norm" else self.of_macs()
        return [s * w for s, w in zip(scores, weights, strict=True)]

    def of_norms(self):
        """‖diag(γ/√(v+ε)) W‖ / ‖W‖: before a normalisation layer, the scale of W is arbitrary."""
        gains = []
        modules = dict(self.joint.model.named_modules())
        for layer in self.joint.layers:
            norm = modules.get(layer.name.replace("conv", "bn"))
            gain = 1.0
            if isinstance(norm, nn.BatchNorm2d):
                per_channel = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
                w = layer.weight.detach().flatten(1)
                gain = float((per_channel[:, None] * w).norm() / w.norm())
            gains.append(gain)
        return gains

    def of_macs(self):
        """1/√MACs of a basis: σ² per MAC has the order of σ/√MACs."""
        macs = np.array([cost.macs_per_rank for cost in self.sizes.selector.costs])
        return np.sqrt(macs.mean() / macs)


class Fixed:
    """Scores that stay as they were found: what `decompose(data=...)` says of the weights of the start."""

    def __init__(self, joint: TwoNetworks, scores) -> None:
        self.sizes, self.scores = joint.sizes, scores

    def draw(self, generator):
        return self.sizes.draw(generator)

    def choose(self, scores, drawn):
        return self.sizes.choose(self.scores, drawn)

    def weighted(self, scores):
        return self.scores


class InMetric(MatrixForm):
    """A form whose matrix is Lᵀ W R, with L Lᵀ and R Rᵀ the moments of what a layer sees and of its gradients."""

    def __init__(self, inner, moments) -> None:
        self.inner = inner
        self.left, self.right = (_root(each).float() for each in (moments.inputs, moments.gradients))

    def takes(self, shape):
        return self.inner.takes(shape)

    def stages(self, axes):
        return self.inner.stages(axes)

    def to_matrix(self, weight):
        return self.left.mT @ super().to_matrix(weight) @ self.right

    def truncate(self, weight, decomposition, ranks, added_gap=0.0):
        p_MR, q_RN = truncate(self.to_matrix(weight), decomposition, ranks[0], added_gap)
        p_MR = torch.linalg.solve_triangular(self.left.mT, p_MR, upper=True)
        q_RN = torch.linalg.solve_triangular(self.right, q_RN, upper=False, left=False)
        return self.stages_of(p_MR, q_RN, weight.shape)


def _root(moment):
    matrix = moment.double()
    matrix.diagonal().add_(DAMPING * matrix.diagonal().mean())
    return torch.linalg.cholesky(matrix)


def in_metric_(joint, model, batches) -> None:
    """The low-rank networks are cut in the metric that the images give the network as it is now."""
    layers = []
    found = second_moments(model, joint.layers, batches, lambda net, x: net(x), drawn_loss)
    moments = {name: each for part in found for name, each in part.items()}
    for layer in joint.layers:
        name = f"metric-{layer.name}"
        FORMS[name] = InMetric(layer.numerics, moments[layer.name])
        layers.append(replace(layer, form=name))
    joint.layers = tuple(layers)
    joint._bases = KeptBases(joint.layers, joint.refresh)


class BasesThatTurn(KeptBases):
    """Refreshed layer by layer: a layer is due once too much of WᵀW, in the bases kept, has left the diagonal."""

    def __init__(self, layers, tolerance) -> None:
        super().__init__(layers, refresh=2**31)
        self.tolerance, self.refreshed = tolerance, Counter()

    @torch.no_grad()
    def of_current_weights(self):
        current = super().of_current_weights()
        due = [layer for layer in self.layers if off_diagonal(current[layer.name]) > self.tolerance]
        self._current |= svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in due})
        self.refreshed.update(layer.name for layer in due)
        return dict(self._current)


def softened(temperature):
    """T² KL(full/T ‖ low/T): with T above 1, what the teacher holds likely besides its answer counts, too."""
    return lambda low, full: temperature**2 * kl_divergence(low / temperature, full / temperature)


def off_diagonal(projected) -> float:
    """1 − Σ σ⁴ / ‖(WV)ᵀ(WV)‖²: zero for an SVD."""
    turned = projected.u if len(projected.u) >= len(projected.v) else projected.v
    gram = (turned * projected.s).mT @ (turned * projected.s)
    return 1 - float(gram.diagonal().square().sum() / gram.square().sum())


@dataclass(frozen=True, eq=False)
class Images:
    """CIFAR-10's training images: those that are trained on, and those that judge."""

    images: torch.Tensor
    labels: torch.Tensor
    held: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def split(cls, images, labels):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(12345))
        return cls(images, labels, order[:HELD_OUT], order[HELD_OUT:])

    def augmented(self, count, seed):
        """The first so many of those that are trained on, in batches."""
        generator = torch.Generator().manual_seed(seed)
        return [augment(self.images[self.kept[part]], generator) for part in torch.arange(count).split(250)]

    def batches(self, steps, generator):
        """Batches of 128 for so many steps, drawn anew in every epoch."""
        place, epoch = 0, torch.randperm(len(self.kept), generator=generator)
        for _ in range(steps):
            if place + 128 > len(self.kept):
                place, epoch = 0, torch.randperm(len(self.kept), generator=generator)
            rows = self.kept[epoch[place : place + 128]]
            place += 128
            x = augment(self.images[rows], generator).contiguous(memory_format=torch.channels_last)
            yield x, self.labels[rows]

    def accuracy(self, net, size) -> float:
        """Percent of those that judge, at a size."""
        net.resize_(macs=size)
        return round(accuracy(net, self.images[self.held], self.labels[self.held]), 2)


def objective(args, model, data):
    """The training of a row, and the scores that its bases have where they are not σ."""
    options = ElasticOptions(
        macs=tuple(args.macs),
        smallest_share=args.smallest,
        distill=args.distill,
        balance=0.0 if args.plain else args.balance,
        low_steps_per_full=args.low_turns if args.turns else 0,
        start=args.late,
        even=max(0.0, args.even_from - args.late) / (1 - args.late),
        refresh=args.refresh,
        order="weights",
    )
    elastic = dn.Elastic(
        model,
        example_input=EXAMPLE,
        steps=args.steps,
        from_scratch=args.late > 0,
        distance=softened(args.temperature) if args.distill else None,
        seed=args.seed,
        options=options,
    )
    joint = elastic.networks
    if args.ratio:
        full_ranks = {layer.name: layer.full_ranks for layer in joint.layers}
        joint.sizes = DrawRatio(full_ranks, joint.sizes.selector.lower, joint.sizes.selector.upper, tuple(args.ratio))
    if args.clip is not None:
        svd_module.RHO_MAX = math.sqrt(args.clip)
    if args.at_most:
        ratio = gradients._ratio
        gradients._ratio = lambda full, low: ratio(full, low).clamp(max=1.0)
    if args.all_norms:
        elastic._norms._names = {parameter: name for name, parameter in model.named_parameters()}
    if args.turned is not None:
        joint._bases = BasesThatTurn(joint.layers, args.turned)
    if args.metric:
        in_metric_(joint, model, data.augmented(1000, seed=2))
    weighted = None
    if args.score != "sigma":
        joint.sizes = weighted = Weighted(joint, args.score)
    if args.ladder:
        found = dn.decompose(model.eval(), example_input=EXAMPLE, data=data.augmented(1000, seed=2))
        joint.sizes = weighted = Fixed(joint, found.selector.scores)
    return elastic, weighted


def taught_by(teacher, is_eval):
    """What the full network says, by another network than the one that is trained, or in another mode."""

    def teach(call):
        twin = copy.deepcopy(teacher)
        twin.train(not is_eval)
        with torch.no_grad():
            return call.run(twin)

    return teach


@torch.no_grad()
def move_(average, model, decay) -> None:
    for a, p in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if a.is_floating_point():
            a.lerp_(p, 1 - decay)


def train(args, elastic, model, average, data) -> float:
    """All steps; what they cost, in passes forward and back."""
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-4), lr=args.rate, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(args.seed)
    start, work = time.time(), 0.0
    for step, (x, y) in enumerate(data.batches(args.steps, generator)):
        rate = args.rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        optimizer.zero_grad()
        losses = elastic.backward(forward=lambda net, x=x: net(x), loss=lambda out, y=y: F.cross_entropy(out, y))
        optimizer.step()
        has_full, has_low = losses.ran != "low", losses.ran != "full"
        work += has_full + has_low + (1 / 3 if has_low and not has_full and args.distill else 0)
        if average is not None:
            move_(average, model, decay=min(args.average, (1 + step) / (10 + step)))
        if step % 50 == 49:
            seen = f"full {float(losses.full):.3f}, low-rank {float(losses.low):.3f}"
            print(f"step {step + 1}: {seen}, {time.time() - start:.0f} s", flush=True)
    return work


def calibrated(args, model, weighted, batches, sizes):
    """The network of all sizes, as the row wants it cut."""
    data = {"data": batches[:4]} if args.metric else {}
    net = dn.decompose(model.eval(), example_input=EXAMPLE, **data)
    if weighted is not None and not args.metric:
        net.selector = replace(net.selector, scores=tuple(weighted.weighted(net.selector.scores)))
    net.calibrate_(batches, sizes=sizes)
    return net


def main() -> None:
    args = arguments()
    data = Images.split(*load_cifar10(args.data, "train"))
    torch.manual_seed(args.seed)
    model = pretrained_resnet20(args.weights).to(memory_format=torch.channels_last)
    elastic, weighted = objective(args, model, data)
    joint = elastic.networks
    average = copy.deepcopy(model) if args.average else None
    if args.average_teaches or args.teacher_eval:
        joint.outputs_of_full = taught_by(average if args.average_teaches else model, args.teacher_eval)
    start = time.time()
    work = train(args, elastic, model, average, data)
    seconds = time.time() - start
    refreshed = dict(joint._bases.refreshed) if args.turned is not None else {}
    if refreshed:
        print(f"{sum(refreshed.values())} SVDs of {len(joint.layers)} layers:", refreshed, flush=True)
    batches = data.augmented(2000, seed=1)
    net = calibrated(args, model, weighted, batches, SIZES[1:])
    found = {"accuracy": {f"{size:g}": data.accuracy(net, size) for size in SIZES}}
    if args.tune:
        net.tune_(batches, sizes=args.tune, progress=lambda line: None)
        found["tuned"] = {f"{size:g}": data.accuracy(net, size) for size in args.tune}
    if average is not None:
        # Its running statistics were averaged, too, and are not those of its weights: full size is calibrated as well.
        net = calibrated(args, average, weighted, batches, SIZES)
        found["average"] = {f"{size:g}": data.accuracy(net, size) for size in SIZES}
    print(args.name, found, f"work {work:.0f}", f"{seconds:.0f} s", flush=True)
    if not args.no_record:
        settings = {k: v for k, v in vars(args).items() if k not in ("data", "weights", "no_record")}
        figures = {"row": args.name, "settings": settings, "work": work, **found}
        record("elastic", figures | ({"refreshed": refreshed} if refreshed else {}))


if __name__ == "__main__":
    main()
