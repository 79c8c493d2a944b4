"""`decompose(data=…)`: a network that was not trained to be cut, with bases and an order that data give it."""

import copy
from unittest.mock import ANY

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.forms import to_factors, to_matrix
from decomposable.network import descent, work
from decomposable.network.goals import drawing, drawn_loss
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused

SIZES = (0.8, 0.6, 0.4, 0.3)


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(96, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


def images(count=64, seed=1):
    """Smooth ones, with one channel that is always dark."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 4, 4, generator=generator)
    coarse[:, 2] = 0
    return F.interpolate(coarse, size=12, mode="bilinear")


@pytest.fixture(scope="module")
def trained():
    """A small network that tells apart by which quarter is brightest, or that none is bright."""
    model = make()
    x = images(512, seed=2)
    means = F.adaptive_avg_pool2d(x[:, 0], 2).flatten(1)
    y = torch.where(means.max(dim=1).values > 0.3, means.argmax(dim=1), 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def batches(count=64, size=16):
    return list(images(count).split(size))


@pytest.fixture(scope="module")
def by_loss(trained):
    net = dn.decompose(trained, data=batches())
    net.calibrate_(batches())
    return net


def loss_of(trained, net, size):
    """KL from the full network's answers, on images that the order was not made from."""
    x = images(256, seed=3)
    net.resize_(macs=size)
    with torch.no_grad():
        return float(F.kl_div(net(x).log_softmax(1), trained(x).log_softmax(1), reduction="batchmean", log_target=True))


@pytest.mark.parametrize("criterion", [None, "loss", "output"])
@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_less_is_lost_than_by_the_weights_alone(trained, criterion, form):
    x = batches()
    nets = {
        "data": dn.decompose(trained, data=x, criterion=criterion, form=form),
        "weights": dn.decompose(trained, x[0], form=form),
    }
    for net in nets.values():
        net.calibrate_(x, sizes=SIZES)
    lost = {name: sum(loss_of(trained, net, size) for size in SIZES) for name, net in nets.items()}
    assert lost["data"] < 0.8 * lost["weights"]


def test_the_full_size_is_the_network_itself(trained, by_loss):
    by_loss.resize_(macs=1.0)
    x = images(8)
    torch.testing.assert_close(by_loss(x), trained(x))


def test_all_bases_together_are_the_weights(trained, by_loss):
    for name, factors in by_loss._current.parts.factors.items():
        weight = trained.get_submodule(name).weight
        form = "spatial" if weight.dim() == 4 else "channel"
        p, q = to_factors(*factors)
        torch.testing.assert_close(p @ q, to_matrix(weight.detach(), form), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_plans_are_nested(by_loss, measure):
    before = None
    for size in np.linspace(0.15, 1.0, 40):
        plan = by_loss.plan(**{measure: float(size)})
        if before is not None:
            assert all(before.ranks[name] <= rank for name, rank in plan.ranks.items())
        before = plan


def test_two_orders_that_are_the_same_inside_every_layer(by_loss):
    selector = by_loss.selector
    assert selector.params_scores is not None
    for scores in (selector.scores, selector.params_scores):
        assert all((np.diff(each) <= 0).all() for each in scores)
    assert not np.array_equal(selector.order, selector.params_order)
    ratio = selector.plan_for(SizeRequest(ratio=0.4))
    kept = selector.order[: round(0.4 * len(selector.order))]
    layers = np.repeat(np.arange(len(selector.costs)), selector.full_ranks)
    assert list(ratio.ranks.values()) == np.maximum(1, np.bincount(layers[kept], minlength=4)).tolist()


def test_what_no_image_uses_goes_first(by_loss):
    """The third channel is always dark: a third of the first layer's bases of full rank says nothing."""
    first = dn.decompose(make().eval(), data=batches(), criterion="output")
    scores = first.selector.scores[0]
    assert scores[6:].max() < 1e-2 * scores[0]


def test_the_model_is_as_before(trained):
    model = copy.deepcopy(trained).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    dn.decompose(model, data=batches())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_same_data_give_the_same_network(trained, by_loss):
    again = dn.decompose(trained, data=batches())
    for one, other in zip(by_loss.selector.scores, again.selector.scores, strict=True):
        assert np.array_equal(one, other)


def test_tuples_dicts_and_loaders_that_end_for_good(trained, by_loss):
    labelled = [(x, torch.zeros(len(x))) for x in batches()]
    for data in (labelled, iter(batches()), (x for x in batches()), [{"x": x} for x in batches()]):
        net = dn.decompose(trained, data=data)
        assert np.array_equal(net.selector.order, by_loss.selector.order)


def test_a_file_keeps_both_orders(by_loss, tmp_path):
    path = tmp_path / "net.safetensors"
    by_loss.save(path)
    loaded = dn.load(path, model=make())
    assert np.array_equal(loaded.selector.params_order, by_loss.selector.params_order)
    for size in (0.3, 0.5, 0.7):
        assert loaded.resize_(params=size) == by_loss.plan(params=size)
        assert loaded.resize_(macs=size) == by_loss.plan(macs=size)


def test_a_file_of_a_size_keeps_both_orders(by_loss, tmp_path):
    path = tmp_path / "net.safetensors"
    by_loss.resize_(macs=0.6)
    by_loss.save(path)
    part = dn.load(path, model=make(), macs=0.5)
    assert np.array_equal(part.selector.params_order, by_loss.selector.params_order)
    plan = part.resize_(params=0.3)  # of what there is: the order per parameter wants one that is gone
    assert plan.params <= 0.3 * plan.full_params
    assert all(plan.ranks[name] <= rank for name, rank in by_loss.plan(macs=0.5).ranks.items())


def test_other_outputs_than_logits_are_refused_for_the_loss_only():
    """Without a criterion, what the network gives says by which it goes."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    with refused("criterion", "a tensor of shape (16, 4, 8, 8)", Saying("or criterion='output'$")):
        dn.decompose(model, data=batches(), criterion="loss")
    net = dn.decompose(model, data=batches())
    assert net.cut_report.criterion == "output"
    assert net.resize_(macs=0.5)


@pytest.mark.parametrize(
    ("options", "option", "came", "allowed"),
    [
        ({"criterion": "loss"}, "criterion", "loss", "with data=loader"),
        ({"criterion": "output"}, "criterion", "output", "with data=loader"),
        ({"criterion": "energy", "data": batches()}, "criterion", "energy", "'loss' or 'output'"),
        ({"data": 3}, "data", 3, "what yields batches"),
        ({"data": []}, "data", 0, "a loader that begins anew each time"),
        ({"data": [torch.full((4, 3, 12, 12), torch.nan)]}, "data", ANY, Saying("^finite inputs")),
    ],
)
def test_what_cannot_be_done_is_refused(options, option, came, allowed):
    with refused(option, came, allowed):
        dn.decompose(make(), **options)


def test_labels_are_drawn_by_the_softmax_and_the_same_in_every_pass():
    """Of p = (0.7, 0.3): ‖g‖² is 0.18 and 0.98, their mean 0.42, so that the first label is drawn in 0.3 of them."""
    logits = torch.log(torch.tensor([[0.7, 0.3]])).repeat(4000, 1).requires_grad_(True)
    losses = [drawn_loss(logits, number) for number in (0, 0, 1)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    losses[0].backward()
    assert torch.allclose(logits.grad.square().sum(1), torch.tensor(0.42))
    assert float((logits.grad[:, 0] < 0).double().mean()) == pytest.approx(0.3, abs=0.03)


def test_the_network_is_measured_again_on_the_way_down(trained, monkeypatch):
    measured = []
    original = descent.second_moments

    def noting(base, *args, **kwargs):
        measured.append(base[0].weight.detach().clone())
        return original(base, *args, **kwargs)

    monkeypatch.setattr(descent, "second_moments", noting)
    net = dn.decompose(trained, data=batches())
    assert net.cut_report.kept == "data"
    goals = [size for size in work.SIZES if size > net.selector.smallest_size]
    # Each of the two halves once, which together are all samples.
    assert len(measured) == 2 * (1 + len(goals))
    assert len(goals) > 1
    assert all(map(torch.equal, measured[::2], measured[1::2]))
    last = measured[::2]
    assert torch.equal(last[0], trained[0].weight)
    # A network that is measured has lost as many bases of its first layer as its size has.
    for size, weight in zip(goals, last[1:], strict=True):
        rank = int(torch.linalg.matrix_rank(to_matrix(weight, "spatial"), rtol=1e-4))
        assert rank == net.plan(macs=size).ranks["0"]


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 100.0])
def test_labels_are_drawn_so_that_the_expectation_is_the_fisher_matrix(scale):
    """Σ q w² g gᵀ over all labels is Σ p g gᵀ = diag(p) − p pᵀ, and every draw of an image counts the same."""
    logits = scale * torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chances, weights = drawing(logits)
    assert torch.allclose(chances.sum(1), torch.ones(6, dtype=torch.float64))
    p = logits.softmax(1)
    for row in range(6):
        gradients = p[row] - torch.eye(5, dtype=torch.float64)
        each = [w**2 * torch.outer(g, g) for w, g in zip(weights[row], gradients, strict=True)]
        found = sum(q * one for q, one in zip(chances[row], each, strict=True))
        assert torch.allclose(found, torch.diag(p[row]) - torch.outer(p[row], p[row]), atol=1e-12)
        traces = torch.stack([one.trace() for one, q in zip(each, chances[row], strict=True) if q > 1e-9])
        assert torch.allclose(traces, traces[:1].expand_as(traces))


def test_a_network_that_is_sure_to_the_last_bit_has_no_gradient_and_no_nan():
    logits = torch.tensor([[1e4, 0.0, 0.0], [0.0, 1.0, 2.0]], requires_grad=True)
    loss = drawn_loss(logits, 0)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0].abs().sum() == 0
    assert logits.grad[1].abs().sum() > 0


def test_a_network_that_is_certain_of_every_image_is_ordered_by_its_outputs(trained):
    """Its loss has no gradient, which would leave the order to chance."""
    certain = copy.deepcopy(trained)
    with torch.no_grad():
        certain[-1].weight.mul_(1e6)
        certain[-1].bias.mul_(1e6)
    with pytest.warns(UserWarning, match="certain of every image.*ordered by what its outputs lose"):
        net = dn.decompose(certain, data=batches())
    net.calibrate_(batches())
    x = images(256, seed=3)
    for size in SIZES:
        net.resize_(macs=size)
        with torch.no_grad():
            assert (net(x).argmax(1) == trained(x).argmax(1)).float().mean() > 0.95, size


def test_a_head_that_the_logits_do_not_depend_on_is_cut_first():
    class WithHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head, self.aside = nn.Linear(12, 16), nn.Linear(16, 4), nn.Linear(16, 16)

        def forward(self, x):
            x = self.trunk(x).relu()
            self.aside(x)
            return self.head(x)

    torch.manual_seed(0)
    net = dn.decompose(WithHead().eval(), data=[torch.randn(32, 12) for _ in range(3)])
    scores = dict(zip((cost.name for cost in net.selector.costs), net.selector.scores, strict=True))
    assert scores["aside"][1:].max() == 0  # a rank of 1 is left of every layer
    assert min(scores["trunk"].min(), scores["head"].min()) > 0


def test_budgets_of_parameters_have_statistics_of_their_own_order(by_loss, trained):
    """A grid of each order: what lies on one is not near what lies on the other."""
    selector = by_loss.selector
    assert selector.measures == ("macs", "params")
    known = {plan.ranks for plan in by_loss._statistics.plans}
    for measure in selector.measures:
        costs = selector.all_costs(1, measure)
        ends = [selector.of_size(int(cost), measure).ranks for cost in (costs[0], costs[-1])]
        assert {*ends} <= known
        own = [int(cost) for cost in costs if selector.of_size(int(cost), measure).ranks in known]
        assert len(own) >= 4
    plain = dn.decompose(trained, batches()[0])
    assert plain.selector.measures == ("macs",)
    plain.calibrate_(iter(batches()))  # one that ends for good
    net = dn.decompose(trained, data=batches())
    report = net.calibrate_(iter(batches()), passes=12)
    assert report.passes <= 12


def test_a_device_keeps_both_orders(by_loss, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    from decomposable_edge import AnySizeSession

    x = images(4)
    net = copy.deepcopy(by_loss)
    net.save(tmp_path / "any.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "any.safetensors")
    differ = 0
    for size in (0.3, 0.5, 0.7):
        for measure in ("params", "macs"):
            plan = session.resize(**{measure: size}, align=1)
            assert dict(plan.ranks) == dict(net.resize_(**{measure: size}).ranks)
            found = np.asarray(session.run(x.numpy()))
            assert np.allclose(found, net(x).numpy(), atol=1e-4)
        differ += net.plan(macs=size).ranks != net.plan(params=size).ranks
    assert differ  # else the two orders would be one


def test_a_batch_of_one_is_complained_of_in_the_name_of_decompose():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with refused("data", 1, Saying("drop_last=True")):
        dn.decompose(model, data=[torch.randn(8, 6), torch.randn(1, 6)])


class Stream(torch.utils.data.IterableDataset):
    """Images one by one; nobody knows how many."""

    def __iter__(self):
        return iter(images(32))


def test_a_loader_that_does_not_know_its_length():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=8)
    net = dn.decompose(make().eval(), images(1), data=loader)
    net.calibrate_(loader, sizes=[0.5])
    net.tune_(loader, sizes=[0.5], steps=1)
    net.resize_(macs=0.5)
    assert net(images(4)).isfinite().all()
