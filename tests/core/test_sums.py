"""Second moments of two parts of the data are those of all of it."""

import math

import pytest
import torch
from torch import nn

from decomposable.core.layers import find_layers
from decomposable.core.moments import second_moments
from decomposable.network.goals import projected_loss


def run(net, batch):
    return net(batch)


def cubes(outputs, number):
    return outputs.pow(3).sum()


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 4))
    return model, find_layers(model, "channel")[0]


def moments_of(batches, loss, **options):
    model, layers = network()
    [found] = second_moments(model, layers, batches, run, loss, **options)
    return found


@pytest.mark.parametrize("loss", [cubes, None])
@pytest.mark.parametrize("centred", [(), ("2",)])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_two_parts_joined_are_one_pass_over_both(loss, centred, cut):
    """Parts of different weight, one of which may be a single batch, whose own error nobody knows."""
    torch.manual_seed(1)
    batches = [torch.randn(count, 5) for count in (6, 3, 8, 4, 7)]
    whole = moments_of(batches, loss, centred=centred)
    one, other = (moments_of(part, loss, centred=centred) for part in (batches[:cut], batches[cut:]))
    if cut == 1:
        assert math.isinf(one["0"].errors[0])
    for name, expected in whole.items():
        found = one[name].joined(other[name])
        torch.testing.assert_close(found.inputs, expected.inputs)
        assert found.errors[0] == pytest.approx(expected.errors[0], rel=1e-4)
        if loss is None:
            assert found.gradients is None
        else:
            torch.testing.assert_close(found.gradients, expected.gradients)
            assert found.errors[1] == pytest.approx(expected.errors[1], rel=1e-4)


def test_a_layer_that_one_part_did_not_reach():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(5, 4), nn.Linear(5, 4)

        def forward(self, x):
            return self.a(x) if x[0, 0] > 0 else self.b(x)

    model = Gated()
    layers, _ = find_layers(model, "channel")
    positive, negative = torch.rand(6, 5) + 0.1, -torch.rand(6, 5) - 0.1

    def found(batches):
        [each] = second_moments(model, layers, batches, run, cubes)
        return each

    one, other, whole = found([positive] * 2), found([negative] * 2), found([positive, positive, negative, negative])
    for name in ("a", "b"):
        joined = one[name].joined(other[name])
        torch.testing.assert_close(joined.inputs, whole[name].inputs)
        torch.testing.assert_close(joined.gradients, whole[name].gradients)


def test_two_parts_have_draws_of_their_own():
    """Else one would find the noise of its draws confirmed by the other: of the last layer, all that there is."""
    batches = [torch.randn(6, 5)]
    one, again, other = (moments_of(batches, projected_loss, first=first)["2"].gradients for first in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
