import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decomposable as dn
from decomposable.elastic import order
from decomposable.elastic.order import NEVER
from decomposable.network.judging import CutReport
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.checkpoint import Position
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(864, 4))


def stepping(*, is_trained: bool = False, **settings: object):
    method, chosen = methods.find("elastic"), with_overrides(Settings(), method="elastic", **settings)
    network = method.network(model(), X, chosen, is_trained=is_trained)
    return network, method.step(network, chosen)


def loss(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(X), Y)


def test_a_step_logs_what_was_computed_in_it():
    _, step = stepping(is_trained=True)
    step.at(0, 100)
    assert [sorted(step.backward(loss)) for _ in range(8)] == ([["loss"]] + [["loss_low", "macs"]] * 3) * 2
    _, step = stepping(elastic_order="weights", elastic_turns=0)
    step.at(50, 100)
    assert sorted(step.backward(loss)) == ["loss", "loss_low", "macs"]
    _, step = stepping(balance=0.0)
    assert [sorted(step.backward(loss)) for _ in range(2)] == [["loss"]] * 2


def make(step, done: float, closure=loss) -> None:
    """A step at this place of a training."""
    step.at(round(100 * done), 100)
    step.backward(closure)


def kinds(step, total: int) -> str:
    """F, L or B for a full step, a low-rank one or one of both at each place of a training of so many."""
    found = ""
    for number in range(total):
        step.at(number, total)
        logged = step.backward(loss)
        found += "B" if {"loss", "loss_low"} <= logged.keys() else "F" if "loss" in logged else "L"
    return found


def test_a_training_from_scratch_begins_with_plain_steps_and_ends_evenly():
    _, step = stepping(elastic_turns=3, elastic_start=0.5, elastic_even=0.6)
    assert kinds(step, 40) == "F" * 20 + "FLLL" * 3 + "FL" * 4
    _, step = stepping(is_trained=True, elastic_even=0.6)
    assert kinds(step, 40) == "FLLL" * 6 + "FL" * 8
    assert kinds(stepping(elastic_start=0.5, elastic_turns=0)[1], 20) == "F" * 10 + "B" * 10


def test_a_short_training_from_scratch_takes_turns_from_the_start_and_a_long_one_is_plain_first():
    assert kinds(stepping()[1], 20) == "FL" * 10
    for steps, start, low_steps in ((1000, 0.0, 1), (1001, 0.5, 0)):
        _, step = stepping()
        step.at(0, steps)
        assert (step.elastic.start, step.steady, step.elastic.low_steps) == (start, start, low_steps)
    _, step = stepping(is_trained=True)
    step.at(0, 1000)
    assert (step.elastic.start, step.elastic.low_steps) == (0.0, 3)


def test_the_learning_rate_falls_with_the_low_rank_steps():
    assert [stepping(elastic_start=start)[1].steady for start in (0.0, 0.5, 1.0)] == [0.0, 0.5, 0.0]
    assert stepping(is_trained=True)[1].steady == 0.0


@pytest.mark.parametrize("after", [7, 13, 14, 18, 22])
def test_a_paced_training_goes_on_exactly(after: int):
    total = 24
    whole, first, second = (stepping(elastic_turns=3, elastic_start=0.25)[1] for _ in range(3))
    expected = kinds(whole, total)
    for number in range(after):
        first.at(number, total)
        first.backward(loss)
    second.load_state_dict(first.state_dict())
    found = ""
    for number in range(after, total):
        second.at(number, total)
        found += "F" if "loss" in second.backward(loss) else "L"
    assert found == expected[after:]


def test_both_networks_in_each_step_stay_so_to_the_end():
    _, step = stepping(elastic_turns=0, elastic_start=0.0, elastic_order="weights")
    for number in (0, 9):
        step.at(number, 10)
        assert sorted(step.backward(loss)) == ["loss", "loss_low", "macs"]


def test_a_loss_that_is_no_number_is_logged_all_the_same():
    _, step = stepping()
    assert math.isnan(step.backward(lambda net: loss(net) * math.nan)["loss"])


def test_the_low_rank_loss_is_the_divergence_from_the_full_network():
    network, step = stepping(elastic_macs=(0.5, 0.5), elastic_distill=1.0, elastic_turns=0)
    step.at(50, 100)
    seen = []

    def watched(net: nn.Module) -> torch.Tensor:
        outputs = net(X)
        seen.append(outputs.detach().log_softmax(1))
        return F.cross_entropy(outputs, Y)

    found = step.backward(watched)
    full, low = seen
    assert float(found["loss_low"]) == pytest.approx(float((full.exp() * (full - low)).sum(1).mean()), rel=1e-5)
    assert found["macs"] <= 0.5
    assert network.model.state_dict().keys() == model().state_dict().keys()


def test_a_network_that_cannot_be_so_small_is_trained_from_the_smallest_that_it_can():
    _, step = stepping(elastic_macs=(0.0001, 0.3))
    low, high = step.elastic.networks.sizes.range
    assert low == step.elastic.networks.sizes.selector.smallest_cost("macs")
    assert high == pytest.approx(0.3 * step.elastic.networks.sizes.selector.full_cost("macs"), abs=1)


def test_other_outputs_than_logits_do_without_distillation():
    def maps() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 1))

    method = methods.find("elastic")
    for distill in (1.0, 0.0):
        options = {"elastic_distill": distill, "elastic_macs": (0.5, 0.8), "elastic_turns": 0}
        settings = with_overrides(Settings(), method="elastic", **options)
        step = method.step(method.network(maps(), X, settings, is_trained=False), settings)
        step.at(50, 100)
        if distill:
            with pytest.raises(
                InvalidArgumentError, match=r"\(samples, classes\), to be distilled, or elastic_distill=0"
            ):
                step.backward(lambda net: net(X).square().mean())
        else:
            assert sorted(step.backward(lambda net: net(X).square().mean())) == ["loss", "loss_low", "macs"]


def test_means_over_an_epoch_are_of_the_steps_that_had_a_value():
    position = Position()
    for values in ({"loss": 2.0}, {"loss_low": 4.0, "macs": 0.5}, {"loss": 4.0}, {"loss_low": 6.0, "macs": 0.1}):
        position.add(values)
    assert position.means() == {"loss": 3.0, "loss_low": 5.0, "macs": 0.3}
    assert (position.sums, position.counts, position.count) == ({}, {}, 0)


def material() -> CalibrationData:
    return CalibrationData(
        example_input=X[:1], calibration=[(X, Y)], calibration_images=8, loss=lambda net, batch: loss(net)
    )


def test_from_scratch_the_order_is_found_by_data_where_the_low_rank_steps_begin():
    network, step = stepping(elastic_start=0.5)
    network.eval()  # so that statistics stay as they are
    step.look_at(material())
    make(step, 0.49)
    assert step.elastic.scores is None
    assert step.elastic.networks.criterion is dn.core.criteria.singular_value
    make(step, 0.5)
    expected = dn.decompose(network.model, X[:1], data=[X]).scores
    assert step.elastic.scores.keys() == expected.keys() == {"0", "4"}
    for name, cuts in expected.items():
        torch.testing.assert_close(step.elastic.scores[name][0], cuts[0])
    for parameter in network.parameters():
        parameter.data.mul_(torch.rand(()))
    make(step, 0.9)
    for name, cuts in expected.items():
        torch.testing.assert_close(step.elastic.scores[name][0], cuts[0])  # once
    net = methods.find("elastic").sized(network, material(), Settings(method="elastic", calibrated_sizes=(0.5,)))
    for name, cuts in expected.items():
        torch.testing.assert_close(net.scores[name][0], cuts[0])


@pytest.mark.parametrize(
    "settings",
    [{"is_trained": True}, {"elastic_order": "weights"}, {"criterion": "energy"}, {"form": "tucker"}],
    ids=str,
)
def test_otherwise_the_weights_of_each_step_say_it(settings):
    _, step = stepping(elastic_start=0.5, **settings)
    step.look_at(material())
    make(step, 0.5)
    assert step.elastic.scores is None


def test_an_order_by_data_may_be_asked_for_from_trained_weights_but_not_for_several_cuts():
    _, step = stepping(is_trained=True, elastic_order="data")
    step.look_at(material())
    make(step, 0.0)
    assert step.elastic.scores is not None
    with pytest.raises(InvalidArgumentError, match="layer '0': form='tucker' with bases by data"):
        stepping(form="tucker", elastic_order="data")
    with pytest.raises(InvalidArgumentError, match="elastic_order=sigma; allowed: data, weights, or none"):
        with_overrides(Settings(), elastic_order="sigma")


def test_the_order_that_was_found_is_resumed():
    (_, first), (network, second) = (stepping(elastic_start=0.5) for _ in range(2))
    first.look_at(material())
    make(first, 0.5)
    for parameter in network.parameters():
        parameter.data.mul_(2.0)  # an order found anew would be another one
    second.look_at(material())
    second.load_state_dict(first.state_dict())
    make(second, 0.6)
    for name, cuts in first.elastic.scores.items():
        torch.testing.assert_close(second.elastic.scores[name][0], cuts[0])


def test_a_network_without_logits_is_put_in_order_by_its_layers_outputs():
    maps = nn.Sequential(nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 1))
    settings = with_overrides(
        Settings(), method="elastic", elastic_distill=0.0, elastic_macs=(0.5, 0.8), elastic_start=0.5
    )
    method = methods.find("elastic")
    network = method.network(maps, X, settings, is_trained=False)
    step = method.step(network, settings)
    step.look_at(material())
    make(step, 0.5, lambda net: net(X).square().mean())
    expected = dn.decompose(maps, X[:1], data=[X], criterion="output").scores
    for name, cuts in expected.items():
        torch.testing.assert_close(step.elastic.scores[name][0], cuts[0])


def test_data_that_are_no_better_than_the_weights_are_told_of_once():
    """Only once: from then on the weights say the order."""
    _, step = stepping(elastic_start=0.5)
    step.look_at(material())
    report = CutReport(criterion="loss", unit="KL divergence", measured_with=8, judged_with=8, sizes=(), kept="weights")
    with mock.patch.object(order, "decompose", return_value=SimpleNamespace(cut_report=report)):
        with pytest.warns(UserWarning, match="order=data is not taken.*no better on samples that were kept out"):
            make(step, 0.5)
        make(step, 0.6)
    assert step.elastic.scores is None
    assert step.elastic.order == "weights"


def test_a_layer_that_is_not_decomposed_is_never_cut():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + x @ self.first.weight)

    x = torch.randn(8, 12)
    settings = with_overrides(Settings(), method="elastic", elastic_macs=(0.9, 1.0), elastic_start=0.5)
    method = methods.find("elastic")
    network = method.network(Tied(), x, settings, is_trained=False)
    step = method.step(network, settings)
    step.look_at(CalibrationData(example_input=x[:1], calibration=[(x, Y)], calibration_images=8, loss=None))
    make(step, 0.5, lambda net: F.cross_entropy(net(x), Y))
    assert (step.elastic.scores["first"][0] == NEVER).all()
    assert (step.elastic.scores["second"][0] < NEVER).all()


def test_what_runs_without_gradients_is_put_in_order_by_outputs_and_what_cannot_be_by_the_weights():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)

    x = torch.randn(8, 12)
    settings, method = with_overrides(Settings(), method="elastic", elastic_start=0.5), methods.find("elastic")
    network = method.network(Frozen(), x, settings, is_trained=False)
    step = method.step(network, settings)
    seen = CalibrationData(example_input=x[:1], calibration=[(x, Y)], calibration_images=8, loss=None)
    step.look_at(seen)
    make(step, 0.5, lambda net: F.cross_entropy(net(x), Y))
    expected = dn.decompose(network.model, x[:1], data=[x], criterion="output").scores
    torch.testing.assert_close(step.elastic.scores["second"][0], expected["second"][0])

    network, step = stepping(elastic_start=0.5)
    step.look_at(CalibrationData(example_input=X[:1], calibration=[], calibration_images=0, loss=None))
    with pytest.warns(UserWarning, match="order=data is not taken, the weights say the order"):
        make(step, 0.5)
    make(step, 0.6)  # once
    assert step.elastic.scores is None


def test_the_order_is_found_without_a_trace_in_the_model():
    network, step = stepping(elastic_start=0.5)
    step.look_at(material())
    network.train()
    network.model[1].eval()
    modes = [module.training for module in network.modules()]
    before = {name: each.clone() for name, each in network.state_dict().items()}
    step.elastic._settle_order()
    assert [module.training for module in network.modules()] == modes
    for name, each in network.state_dict().items():
        assert torch.equal(each, before[name]), name


def test_an_order_and_another_criterion_are_refused():
    with pytest.raises(InvalidArgumentError, match="order=data and criterion=energy: each is an order"):
        stepping(elastic_order="data", criterion="energy")
