import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decomposable import methods
from decomposable.errors import InvalidArgumentError
from decomposable.methods.settings import Settings
from decomposable.training.checkpoint import Position

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(864, 4))


def stepping(*, is_trained: bool = False, **settings: object):
    method, chosen = methods.find("elastic"), Settings(method="elastic", **settings)
    network = method.network(model(), X, chosen, is_trained=is_trained)
    return network, method.step(network, chosen)


def loss(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(X), Y)


def test_a_step_logs_what_was_computed_in_it():
    _, step = stepping(is_trained=True)
    assert [sorted(step.backward(loss)) for _ in range(8)] == ([["loss"]] + [["loss_low", "macs"]] * 3) * 2
    _, step = stepping()
    assert sorted(step.backward(loss)) == ["loss", "loss_low", "macs"]
    _, step = stepping(balance=0.0)
    assert [sorted(step.backward(loss)) for _ in range(2)] == [["loss"]] * 2


def kinds(step, total: int) -> str:
    """F, L or B for a full step, a low-rank one or one of both at each place of a training of so many."""
    found = ""
    for number in range(total):
        step.at(number / total)
        logged = step.backward(loss)
        found += "B" if {"loss", "loss_low"} <= logged.keys() else "F" if "loss" in logged else "L"
    return found


def test_a_training_from_scratch_begins_with_plain_steps_and_ends_evenly():
    _, step = stepping(elastic_turns=3, elastic_start=0.5, elastic_even=0.6)
    assert kinds(step, 40) == "F" * 20 + "FLLL" * 3 + "FL" * 4
    _, step = stepping(is_trained=True, elastic_even=0.6)
    assert kinds(step, 40) == "FLLL" * 6 + "FL" * 8
    assert kinds(stepping()[1], 20) == "F" * 10 + "B" * 10


def test_the_learning_rate_falls_with_the_low_rank_steps():
    assert [stepping(elastic_start=start)[1].steady for start in (0.0, 0.5, 1.0)] == [0.0, 0.5, 0.0]
    assert stepping(is_trained=True)[1].steady == 0.0


@pytest.mark.parametrize("after", [7, 13, 14, 18, 22])
def test_a_paced_training_goes_on_exactly(after: int):
    total = 24
    whole, first, second = (stepping(elastic_turns=3, elastic_start=0.25)[1] for _ in range(3))
    expected = kinds(whole, total)
    for number in range(after):
        first.at(number / total)
        first.backward(loss)
    second.load_state_dict(first.state_dict())
    found = ""
    for number in range(after, total):
        second.at(number / total)
        found += "F" if "loss" in second.backward(loss) else "L"
    assert found == expected[after:]


def test_both_networks_in_each_step_stay_so_to_the_end():
    _, step = stepping(elastic_turns=0, elastic_start=0.0)
    for done in (0.0, 0.9):
        step.at(done)
        assert sorted(step.backward(loss)) == ["loss", "loss_low", "macs"]


def test_a_loss_that_is_no_number_is_logged_all_the_same():
    _, step = stepping()
    assert math.isnan(step.backward(lambda net: loss(net) * math.nan)["loss"])


def test_the_low_rank_loss_is_the_divergence_from_the_full_network():
    network, step = stepping(elastic_macs=(0.5, 0.5), elastic_distill=1.0)
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
    low, high = step.joint.sizes.range
    assert low == step.joint.sizes.selector.smallest_cost("macs")
    assert high == pytest.approx(0.3 * step.joint.sizes.selector.full_cost("macs"), abs=1)


def test_other_outputs_than_logits_do_without_distillation():
    def maps() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 24, 3), nn.Conv2d(24, 4, 1))

    method = methods.find("elastic")
    for distill in (1.0, 0.0):
        settings = Settings(method="elastic", elastic_distill=distill, elastic_macs=(0.5, 0.8))
        step = method.step(method.network(maps(), X, settings, is_trained=False), settings)
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
