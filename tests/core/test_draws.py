import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.forms import to_matrix
from decomposable.core.networks import TwoNetworks
from decomposable.core.svd import svd
from decomposable_edge.errors import BudgetError, InvalidArgumentError

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0])


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2),
        nn.Flatten(),
        nn.Linear(288, 5),
    )


def joint_of(net: nn.Module, **options: object) -> dn.JointObjective:
    return dn.JointObjective(net, example_input=X, seed=0, **options)  # type: ignore[arg-type]


def loss(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(X), Y)


@pytest.mark.parametrize("measure", ["macs", "params"])
@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_a_budget_is_the_very_plan_of_resize(measure: str, form: str) -> None:
    net = model()
    sizes = {}
    for budget in (0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0):
        joint = joint_of(net, form=form, **{measure: budget})
        decompositions = svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in joint.layers})
        plan = dn.decompose(net, X, form=form).resize_(**{measure: budget}) if budget == 1.0 else None
        if plan is None:
            with pytest.warns(UserWarning, match="batch normalisation"):
                plan = dn.decompose(net, X, form=form).resize_(**{measure: budget})
        assert joint.select_ranks(decompositions, joint.sizes.draw(joint._generator)) == dict(plan.ranks)
        losses = joint.backward(loss)
        assert losses.macs == plan.macs_fraction
        assert losses.params == plan.params_fraction
        assert losses.ratio == plan.ratio
        sizes[budget] = plan.dense
    assert sizes[0.1] != sizes[0.9], "some layer is dense in one and not in the other"


def test_a_budget_has_the_rounded_ranks_of_resize_in_wide_layers() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 300)), torch.randn(2, 300)
    joint = dn.JointObjective(net, macs=0.45, example_input=x, seed=0)
    decompositions = svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in joint.layers})
    found, cut = joint.select_ranks(decompositions, joint.sizes.draw(joint._generator)), dn.decompose(net, x)
    assert found == dict(cut.plan(macs=0.45).ranks) != dict(cut.plan(macs=0.45, align=1).ranks)


def test_the_network_that_is_trained_gives_the_outputs_of_the_one_that_is_shipped() -> None:
    net = model().eval()
    outputs = []
    joint_of(net, macs=0.5).backward(
        forward=lambda n: outputs.append(n(X)) or outputs[-1], loss=lambda out: F.cross_entropy(out, Y)
    )
    shipped = dn.decompose(net, X)
    with pytest.warns(UserWarning, match="batch normalisation"):
        shipped.resize_(macs=0.5)
    assert torch.allclose(outputs[1], shipped(X), atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-2)


def test_budgets_are_drawn_log_uniformly_and_the_smallest_as_often_as_asked() -> None:
    for smallest in (0.0, 0.25):
        joint = TwoNetworks(model(), sizes={"macs": (0.1, 0.8)}, smallest_share=smallest, example_input=X, seed=0)
        drawn = np.array([joint.draw() for _ in range(4000)])
        low, high = joint.sizes.range
        is_smallest = drawn == low
        assert abs(is_smallest.mean() - smallest) < 0.03
        places = np.sort(np.log(drawn[~is_smallest] / low) / math.log(high / low))
        distance = np.abs(places - np.arange(1, len(places) + 1) / len(places)).max()
        assert distance < 1.63 / math.sqrt(len(places))  # Kolmogorov and Smirnov, 1%


def test_all_that_is_drawn_stays_inside_the_range() -> None:
    net = model()
    joint = joint_of(net, macs=(0.15, 0.6))
    found = [joint.backward(loss).macs for _ in range(30)]
    assert 0.05 < min(found) < 0.25
    assert 0.4 < max(found) <= 0.6 + 1e-6


def test_counts_are_budgets_as_in_resize() -> None:
    net = model()
    full = dn.decompose(net, X).plan().full_macs
    assert full is not None
    assert (
        joint_of(net, macs=(full // 5, full // 2)).sizes.range
        == joint_of(net, macs=(full // 5 / full, full // 2 / full)).sizes.range
    )


def test_example_input_leaves_no_trace_in_the_model() -> None:
    net = model().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    joint_of(net, macs=(0.1, 0.5))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training


def test_params_need_no_example_input_and_then_macs_are_not_known() -> None:
    net = model()
    losses = dn.JointObjective(net, params=(0.3, 0.3), seed=0).backward(loss)
    assert losses.params <= 0.3
    assert math.isnan(losses.macs)


def test_several_inputs_by_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 20), nn.Linear(20, 5)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) * scale)

    batch = {"x": torch.randn(3, 8), "scale": torch.ones(3, 1)}
    net = Two()
    joint = dn.JointObjective(net, macs=(0.3, 0.6), example_input=batch, forward=lambda n, b: n(**b), seed=0)
    assert joint.backward(lambda n: n(**batch).square().mean()).macs <= 0.6


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"macs": (0.1, 0.5), "ratio": (0.1, 0.5)}, "ratio and macs: got both; allowed: one of ratio, macs, params"),
        ({"macs": (0.6, 0.5)}, r"macs=\(0.6, 0.5\); allowed: \(smallest, largest\) with smallest <= largest"),
        ({"macs": (0.1, 0.5, 0.7)}, "allowed: a budget, or"),
        ({"macs": (0.1, 1.5)}, "allowed: a fraction in"),
        ({"macs": "0.1"}, "allowed: a fraction in"),
        ({"macs": (0.1, 0.5), "example_input": None}, "allowed: with example_input="),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        dn.JointObjective(model(), **{"example_input": X, **options})


def test_an_impossible_budget_states_the_smallest_possible_one() -> None:
    with pytest.raises(BudgetError, match=r"macs=0\.001 is too small: the smallest possible is 0\.0"):
        joint_of(model(), macs=(0.001, 0.5))


def test_a_range_that_is_the_wrong_way_round_is_refused_as_that():
    """And not as a budget that is too small, which its second end would be."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(InvalidArgumentError, match="smallest <= largest"):
        dn.JointObjective(model, macs=(0.9, 0.001), example_input=torch.zeros(1, 8))


@pytest.mark.parametrize("form", ["spatial", "channel", "tucker"])
def test_the_order_of_another_network_is_gone_by_whatever_the_weights_are(form: str) -> None:
    net, other = model(), model(seed=1)
    found = dn.decompose(other, X, form=form, criterion="energy")
    joint = joint_of(net, form=form, macs=0.3, criterion=found.scores)
    plan = dn.decompose(net, X, form=form, criterion=found.scores).plan(macs=0.3)
    assert dict(plan.ranks) == dict(found.plan(macs=0.3).ranks)
    assert dict(plan.ranks) != dict(dn.decompose(net, X, form=form).plan(macs=0.3).ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        assert joint.backward(loss).macs == plan.macs_fraction
        assert joint.select_ranks(joint._bases.of_current_weights(), 0.3 * plan.full_macs) == dict(plan.ranks)
        optimizer.step()


def test_an_order_may_change_between_two_steps_and_one_of_another_network_is_refused() -> None:
    net = model()
    joint, scores = joint_of(net, macs=0.3), dn.decompose(net, X, criterion="uniform").scores
    before = joint.backward(loss).ratio
    joint.criterion = scores
    assert joint.backward(loss).ratio != before
    without = {name: cuts for name, cuts in scores.items() if name != "3"}
    for wrong in (without, scores | {"3": [np.array([1.0])]}):
        with pytest.raises(InvalidArgumentError, match="of layer '3'; allowed: scores for"):
            joint.criterion = wrong
        with pytest.raises(InvalidArgumentError, match="of layer '3'; allowed: scores for"):
            dn.decompose(net, X, criterion=wrong)
    assert joint.criterion.keys() == scores.keys(), "the one before is in force"


def test_scores_are_a_copy() -> None:
    net = dn.decompose(model(), X)
    plan = net.plan(macs=0.3)
    for cuts in net.scores.values():
        cuts[0][:] = 0.0
    assert net.plan(macs=0.3) == plan


def test_an_order_that_was_set_on_the_way_is_in_the_state() -> None:
    first, second = (joint_of(model(), macs=0.3) for _ in range(2))
    first.criterion = dn.decompose(model(seed=1), X, criterion="uniform").scores
    state = first.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.backward(loss).ratio == first.backward(loss).ratio
    for wrong in (3, {"0": 3}, {"0": [3]}):
        with pytest.raises(InvalidArgumentError, match="allowed: "):
            second.load_state_dict({**state, "scores": wrong})
    assert second.criterion.keys() == first.criterion.keys()


def test_scores_of_one_cut_may_come_by_themselves() -> None:
    net = model()
    scores = dn.decompose(net, X).scores
    plain = {name: cuts[0] for name, cuts in scores.items()}
    assert dn.decompose(net, X, criterion=plain).plan(macs=0.3) == dn.decompose(net, X).plan(macs=0.3)


@pytest.mark.parametrize("kind", ["lstm", "attention"])
def test_what_a_model_does_not_run_without_stays_closed_as_when_it_is_shipped(kind: str) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(6, 8, batch_first=True) if kind == "lstm" else nn.MultiheadAttention(6, 2)
            self.head = nn.Linear(8 if kind == "lstm" else 6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.inner, nn.LSTM) or kind == "lstm":
                return self.head(self.inner(x.to(self.inner.weight_hh_l0.dtype))[0][:, -1])
            x = x.to(self.inner.in_proj_weight.dtype)
            return self.head(self.inner(x, x, x)[0][:, -1])

    net, x = Asking(), torch.randn(4, 5, 6)
    joint = dn.JointObjective(net, macs=0.999, example_input=x, seed=0)
    assert joint.backward(lambda low: F.cross_entropy(low(x), Y % 3)).macs < 1
    shipped = dn.decompose(net, x)
    assert [layer.name for layer in joint.layers] == [layer.name for layer in shipped.layers] == ["head"]
    assert joint.skipped["inner"].startswith("the model does not run without it: AttributeError")
    assert joint.sizes.selector.smallest_cost("params") == shipped.selector.smallest_cost("params")


@pytest.mark.parametrize("inner", [nn.LSTM(6, 8), nn.TransformerEncoderLayer(6, 2, 8)], ids=["lstm", "encoder"])
def test_parameters_of_what_is_opened_count_once(inner: nn.Module) -> None:
    x = torch.randn(4, 5, 6)
    joint = dn.JointObjective(inner, params=(0.8, 0.9), example_input=x, seed=0)
    shipped = dn.decompose(inner, x).selector
    full = sum(p.numel() for p in inner.parameters())
    assert joint.sizes.selector.full_cost("params") == shipped.full_cost("params") == full
    assert joint.sizes.selector.smallest_cost("params") == shipped.smallest_cost("params")
