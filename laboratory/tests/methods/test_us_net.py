import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposable import models
from decomposable.network.file.container import read_container
from decomposable.recipes.settings import Settings
from decomposable.training import experiment, methods
from decomposable.training.divergence import DivergedError, WatchedLoss, check_finite
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.sized import restored
from decomposable_lab.methods.us_net import METHOD

SETTINGS = with_overrides(Settings(), method="us-net", width_range=(0.25, 1.0), random_widths=2)
EXAMPLE = torch.zeros(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    return torch.randn(16, 1, 8, 8), torch.randint(10, (16,))


def make(settings=SETTINGS, model=None):
    return METHOD.network(model or models.small_cnn(), EXAMPLE, settings, is_trained=False)


def loss_of(batch):
    return lambda net: F.cross_entropy(net(batch[0]), batch[1])


def material(batches=()):
    batches = list(batches) or [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(3)]
    return CalibrationData(
        example_input=EXAMPLE, calibration=batches, loss=lambda net, b: F.cross_entropy(net(b[0]), b[1])
    )


def channels(net):
    """Of the first layer; 32 at full width."""
    return net[0].weight.shape[0]


def test_the_sandwich(batch):
    network, seen = make().train(), []

    def closure(net):
        seen.append(net)
        return loss_of(batch)(net)

    step = METHOD.step(network, SETTINGS)
    drawn = list(METHOD.step(network, SETTINGS).draw().values())  # of another step with the same seed
    values = step.backward(closure)
    assert seen[0] is network.model
    assert drawn[0] == 0.25
    assert [channels(net) for net in seen] == [32, *(math.floor(32 * width) for width in drawn)]
    assert list(values) == [
        *("loss", "loss_0.25", "loss_random1", "loss_random2"),
        *("distillation_0.25", "distillation_random1", "distillation_random2"),
    ]
    with torch.no_grad():
        for net, value in zip(seen, values.values(), strict=False):
            torch.testing.assert_close(loss_of(batch)(net), value)


def test_random_widths_are_uniform_in_the_range():
    settings = with_overrides(Settings(), width_range=(0.3, 1.0), random_widths=3)
    step = METHOD.step(make(settings), settings)
    drawn = torch.tensor([list(step.draw().values()) for _ in range(400)])
    assert (drawn[:, 0] == torch.tensor(0.3)).all()
    others = drawn[:, 1:]
    assert others.min() >= 0.3
    assert others.max() <= 1.0
    assert others.mean().item() == pytest.approx(0.65, abs=0.02)
    assert others.quantile(0.25).item() == pytest.approx(0.475, abs=0.03)
    other_seed = METHOD.step(
        make(settings), with_overrides(Settings(), width_range=(0.3, 1.0), random_widths=3, seed=1)
    )
    assert list(other_seed.draw().values()) != drawn[0].tolist()


def test_the_gradient_by_hand(batch):
    """Plain modules with slices of the weights, whose gradients are put where the slices are."""
    network, settings = make().train(), SETTINGS
    model = copy.deepcopy(network.model)
    step = METHOD.step(network, settings)
    widths = list(METHOD.step(network, settings).draw().values())
    step.backward(loss_of(batch))

    x, y = batch
    outputs = model(x)
    F.cross_entropy(outputs, y).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    target = torch.softmax(outputs, 1).detach()
    for width in widths:
        narrow = models.small_cnn([math.floor(c * width) for c in (32, 64, 64, 64, 64)])
        full = model.state_dict()
        narrow.load_state_dict({k: full[k][tuple(map(slice, v.shape))] for k, v in narrow.state_dict().items()})
        log_probabilities = torch.log_softmax(narrow(x), 1)
        (-(target * log_probabilities).sum(1).mean()).backward()
        for name, p in narrow.named_parameters():
            expected[name][tuple(map(slice, p.shape))] += p.grad
    for name, p in network.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_statistics_are_those_of_the_largest_width(batch):
    network = make().train()
    alone = copy.deepcopy(network.model)
    METHOD.step(network, SETTINGS).backward(loss_of(batch))
    alone(batch[0])
    for (name, ours), (_, theirs) in zip(network.model.named_buffers(), alone.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_nothing_random_is_the_two_ends(batch):
    settings = with_overrides(Settings(), width_range=(0.5, 1.0), random_widths=0)
    values = METHOD.step(make(settings).train(), settings).backward(loss_of(batch))
    assert list(values) == ["loss", "loss_0.5", "distillation_0.5"]


def test_it_goes_on_with_the_same_draws():
    network = make()
    step = METHOD.step(network, SETTINGS)
    step.draw()
    state = step.state_dict()
    expected = [step.draw() for _ in range(3)]
    other = METHOD.step(network, SETTINGS)
    other.load_state_dict(state)
    assert [other.draw() for _ in range(3)] == expected
    with pytest.raises(InvalidArgumentError, match="no entry 'generator'"):
        other.load_state_dict({})


def test_drawing_leaves_the_global_generator_alone(batch):
    network = make().train()
    before = torch.get_rng_state()
    METHOD.step(network, SETTINGS).backward(loss_of(batch))
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_are_the_largest_widths_within_them():
    settings = with_overrides(Settings(), width_range=(0.25, 1.0), sizes=(1.0, 0.5, 0.501, 0.3, 0.01))
    network = make(settings)
    sized = METHOD.sized(network, material(), settings)
    assert len(sized.sizes) == 4
    assert [size.value for size in sized.sizes][:: len(sized.sizes) - 1] == [1.0, 0.25]
    for size, wanted in zip(sized.sizes[1:3], (0.501, 0.3), strict=True):
        assert size.macs_fraction <= wanted
        assert network.widths.cost(size.value + 0.03).macs > wanted * size.full_macs
        assert size.name == f"width {size.value:.4g}"
    for size in sized.sizes:
        sized.resize_(size)
        assert sum(p.numel() for p in sized.module.parameters()) == size.params


def test_statistics_are_calculated_for_each_size():
    network, data = make(), material()
    sized = METHOD.sized(network, data, Settings(sizes=(0.5,)))
    for size in sized.sizes:
        sized.resize_(size)
        first = sized.module[0]
        maps = torch.stack([first(x) for x, _ in data.calibration]).detach()  # (batches, images, channels, y, x)
        torch.testing.assert_close(sized.module[1].running_mean, maps.mean((1, 3, 4)).mean(0))
        variances = torch.stack([m.transpose(0, 1).flatten(1).var(1) for m in maps])
        torch.testing.assert_close(sized.module[1].running_var, variances.mean(0))


def test_a_network_without_normalisation(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    network = make(model=model).train()
    METHOD.step(network, SETTINGS).backward(loss_of(batch))
    sized = METHOD.sized(network, material(), SETTINGS)
    sized.resize_(macs=0.5)
    assert sized.module[1].out_features == 10


def test_a_file_of_it(tmp_path, batch):
    settings = with_overrides(Settings(), width_multiple=4, sizes=(1.0, 0.5, 0.2))
    network = make(settings).train()
    METHOD.step(network, settings).backward(loss_of(batch))
    sized = METHOD.sized(network, material(), settings).eval()
    sized.save(tmp_path / "net")
    description, tensors = read_container(tmp_path / "net")
    other, build = METHOD.rebuilt(models.small_cnn(), EXAMPLE, Settings(), description["structure"])
    again = restored(tmp_path / "net", description, tensors, other, build).eval()
    assert again.sizes == sized.sizes
    for size in sized.sizes:
        sized.resize_(size)
        again.resize_(size)
        assert channels(sized.module) % 4 == 0
        assert torch.equal(again(batch[0]), sized(batch[0]))


def test_low_precision_and_residual_networks():
    x, y = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last), torch.arange(4)
    model = models.resnet20().to(memory_format=torch.channels_last)
    network = METHOD.network(model, x[:1], SETTINGS, is_trained=False).train()
    watched = WatchedLoss(lambda net, b: F.cross_entropy(net(b[0]), b[1]), (x, y), "bfloat16")
    values = METHOD.step(network, SETTINGS).backward(watched)
    assert values["distillation_0.25"].dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_where_a_narrow_width_diverges_is_said(tmp_path, batch):
    network = make().train()
    watched = WatchedLoss(lambda net, b: F.cross_entropy(net(b[0]), b[1]), batch, "float32")
    values = {name: float(value) for name, value in METHOD.step(network, SETTINGS).backward(watched).items()}
    assert len(watched.networks) == sum(name.startswith("loss") for name in values) == 4
    with torch.no_grad():
        network.model[3].weight[0, 0] = math.nan  # a view of it is in every network
    with pytest.raises(DivergedError, match="first in the output of layer '3'"):
        check_finite(network, {**values, "loss_0.25": math.nan}, 1.0, watched, 0, tmp_path / "none")


def test_outputs_that_cannot_be_distilled_are_refused(batch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.cnn = models.small_cnn()

        def forward(self, x):
            y = self.cnn(x)
            return y, y

    step = METHOD.step(make(model=Two()), SETTINGS)
    with pytest.raises(InvalidArgumentError, match=r"model: it gives tuple; allowed .*\(samples, classes\)"):
        step.backward(lambda net: F.cross_entropy(net(batch[0])[0], batch[1]))
    step = METHOD.step(make(), SETTINGS)
    with pytest.raises(InvalidArgumentError, match="it calls the network 0 times"):
        step.backward(lambda net: F.cross_entropy(net[:](batch[0]), batch[1]))
    with pytest.raises(InvalidArgumentError, match="it calls the network 2 times"):
        step.backward(lambda net: (net(batch[0]) + net(batch[0])).sum())


def test_a_largest_width_below_one_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"width_range=0.25,0.9; allowed with method=us-net: .* 0.25,1"):
        METHOD.check(with_overrides(Settings(), width_range=(0.25, 0.9)), has_init=False)
    METHOD.check(SETTINGS, has_init=False)


def test_all_widths_learn(batch):
    network = make().train()
    step, optimizer = METHOD.step(network, SETTINGS), torch.optim.SGD(network.parameters(), lr=0.1)
    rows = []
    for _ in range(25):
        optimizer.zero_grad()
        rows.append({name: float(value) for name, value in step.backward(loss_of(batch)).items()})
        optimizer.step()
    assert all(rows[-1][name] < 0.5 * rows[0][name] for name in ("loss", "loss_0.25", "loss_random1"))


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setitem(methods.METHODS, "us-net", METHOD)
    arguments = {
        "device": "cpu",
        "method": "us-net",
        "epochs": 1,
        "train_images": 200,
        "calibration_images": 100,
        "sizes": (1, 0.3),
    }
    whole = experiment.train("digits", out=tmp_path / "whole", **arguments)
    assert [round(row["size"], 1) for row in whole["sizes"]] == [1.0, 0.3, 0.1]
