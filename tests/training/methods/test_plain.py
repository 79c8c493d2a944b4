"""Normal learning: a plain step, and the paper's eight baselines from the one network."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from decomposable import DecomposedNet, models
from decomposable.core.forms import MATRIX_FORMS
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable.training.methods.plain import METHOD

SETTINGS = Settings(method="plain", calibrated_sizes=(0.3, 0.6))
SHORT_CRITERIA = {"singular_value": "sv", "energy": "eng", "uniform": "uni", "taylor": "tay"}
VARIANTS = {
    f"base_{form[:2]}_{short}": {"form": form, "criterion": criterion}
    for form in MATRIX_FORMS
    for criterion, short in SHORT_CRITERIA.items()
}

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation (still has|was calibrated)")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def model():
    """For images of 1 × 8 × 8, with batch normalisation, and weights whose scales differ from layer to layer."""
    net = models.small_cnn((8, 12, 12, 16, 16))
    with torch.no_grad():
        for i, parameter in enumerate(p for p in net.parameters() if p.dim() > 1):
            parameter.mul_(1 + 0.4 * i)
    return net.eval()


def batches(count=3):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 1, 8, 8, generator=generator), torch.arange(6)) for _ in range(count)]


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def material(data=None):
    return CalibrationData(example_input=torch.zeros(1, 1, 8, 8), calibration=data or batches(), loss=loss)


def sized(net, variant, data=None):
    return METHOD.sized(net, material(data), with_overrides(SETTINGS, VARIANTS[variant]))


def kernels(net):
    return {name: m.weight for name, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}


def matrix(weight, form):
    w = weight.detach().double()
    if w.dim() == 2 or form == "channel":
        return w.flatten(1).T
    o, i, h, width = w.shape
    return torch.einsum("oihw->iwoh", w).reshape(i * width, o * h)


def scores(net, form, criterion):
    """Every layer's scores in descending order, by LAPACK."""
    result = {}
    gradients = []
    if criterion == "taylor":
        twin = copy.deepcopy(net).eval()
        for batch in batches():
            twin.zero_grad()
            loss(twin, batch).backward()
            gradients.append({name: weight.grad for name, weight in kernels(twin).items()})
    for name, weight in kernels(net).items():
        u, s, vt = torch.linalg.svd(matrix(weight, form), full_matrices=False)
        if criterion == "singular_value":
            value = s
        elif criterion == "energy":
            value = torch.stack([s[i:].square().sum() / s.square().sum() for i in range(len(s))])
        elif criterion == "uniform":
            value = 1 - (torch.arange(len(s)) + 0.5) / len(s)
        else:
            each = [torch.einsum("mk,mn,kn->k", u, matrix(g[name], form), vt).abs() * s for g in gradients]
            value = torch.stack(each).mean(dim=0)
        result[name] = value.sort(descending=True).values.numpy()
    return result


def ranks_by_hand(layer_scores, ratio):
    pairs = [(score, name) for name, values in layer_scores.items() for score in values]
    kept = sorted(pairs, key=lambda pair: -pair[0])[: round(ratio * len(pairs))]
    return {name: max(1, sum(n == name for _, n in kept)) for name in layer_scores}


def macs(module, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_decomposed_by_its_form_and_criterion(variant):
    net = model()
    decomposed = sized(net, variant)
    assert isinstance(decomposed, DecomposedNet)
    expected = scores(net, **VARIANTS[variant])
    for ratio in (0.2, 0.5, 0.8):
        ranks = decomposed.resize_(ratio=ratio).ranks
        assert ranks == ranks_by_hand(expected, ratio)
    decomposed.resize_(ratio=0.2)
    first, second = decomposed.extract()[10]
    shapes = [first.kernel_size, second.kernel_size]
    assert shapes == ([(1, 3), (3, 1)] if VARIANTS[variant]["form"] == "spatial" else [(3, 3), (1, 1)])


def test_the_variants_differ():
    net = model()
    plans = {variant: tuple(sized(net, variant).resize_(macs=0.4).ranks.values()) for variant in VARIANTS}
    assert len(set(plans.values())) == 8


@pytest.mark.parametrize("variant", VARIANTS)
def test_macs_and_parameters_are_those_of_the_extracted_network(variant):
    net, x = model(), torch.randn(1, 1, 8, 8)
    decomposed = sized(net, variant)
    assert decomposed.plan().full_macs == macs(net, x)
    for size in (1.0, 0.7, 0.4, 0.2):
        plan, module = decomposed.resize_(macs=size), decomposed.extract()
        assert plan.macs == macs(module, x) <= size * plan.full_macs
        assert plan.params == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_full_size_is_the_model_and_the_model_stays_as_it_is(variant):
    net, x = model(), torch.randn(5, 1, 8, 8)
    before = copy.deepcopy(net.state_dict())
    decomposed = sized(net, variant)
    assert decomposed.plan().is_full
    assert torch.equal(decomposed(x), net(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    decomposed.resize_(macs=0.3)
    assert not torch.equal(decomposed(x), net(x))
    assert all(p.grad is None for p in net.parameters())


def test_the_smaller_the_size_the_farther_the_outputs():
    net, x = model(), torch.randn(20, 1, 8, 8)
    decomposed = sized(net, "base_sp_sv")
    errors = []
    for size in (0.95, 0.6, 0.15):
        decomposed.resize_(macs=size)
        errors.append((decomposed(x) - net(x)).square().mean().item())
    assert errors == sorted(errors)


def test_the_calibration_data_reach_the_taylor_criterion_and_the_statistics():
    net = model()
    other = [(x + 3, y.flip(0)) for x, y in batches()]
    ours, theirs = (sized(net, "base_ch_tay", data) for data in (None, other))
    assert not np.array_equal(np.concatenate(ours.selector.scores), np.concatenate(theirs.selector.scores))
    for decomposed in (ours, theirs):
        decomposed.resize_(macs=0.3)
    assert not torch.equal(ours.module[1].running_mean, theirs.module[1].running_mean)


def test_a_step_is_the_gradient_of_the_loss():
    net, twin = model().train(), model().train()
    twin.load_state_dict(net.state_dict())
    step, batch = METHOD.step(net, SETTINGS), batches()[0]
    logged = step.backward(lambda network: loss(network, batch))
    expected = loss(twin, batch)
    expected.backward()
    assert list(logged) == ["loss"]
    assert torch.equal(logged["loss"], expected.detach())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert step.state_dict() == {}
    step.load_state_dict({})


def test_it_trains_the_model_itself_and_takes_all_settings():
    net = model()
    METHOD.check(replace(SETTINGS, criterion="taylor"), has_init=False)
    assert METHOD.network(net, torch.zeros(1, 1, 8, 8), SETTINGS, is_trained=True) is net
