import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.joint import Losses
from decomposable_edge.errors import InvalidArgumentError

GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [
    (torch.randn(8, 3, 6, 6, generator=GENERATOR), torch.randint(0, 4, (8,), generator=GENERATOR)) for _ in range(6)
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(), nn.Linear(160, 4))


def objective(net: nn.Module, **options: object) -> dn.JointObjective:
    return dn.JointObjective(net, **{"ratio": (0.1, 0.6), "turns": True, "seed": 0, **options})  # type: ignore[arg-type]


def call(joint: dn.JointObjective, batch: tuple[torch.Tensor, torch.Tensor], **more: object) -> Losses:
    x, y = batch
    return joint.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y), **more)  # type: ignore[arg-type]


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def test_full_and_low_rank_in_turn_and_the_absent_loss_is_nan() -> None:
    joint = objective(model())
    for number in range(6):
        losses = call(joint, BATCHES[number])
        assert math.isnan(float(losses.low if number % 2 == 0 else losses.full))
        assert math.isfinite(float(losses.full if number % 2 == 0 else losses.low))
        assert math.isnan(losses.ratio) == (number % 2 == 0)


def test_several_low_rank_calls_after_each_full_one() -> None:
    joint = objective(model(), turns=3)
    has_full = [math.isfinite(float(call(joint, BATCHES[number % 6]).full)) for number in range(12)]
    assert has_full == [True, False, False, False] * 3


@pytest.mark.parametrize("turns", [0, -1, 1.5, "2", None])
def test_turns_that_are_no_number_of_calls_are_refused(turns: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"turns=.*; allowed: True, False or an int of at least 1"):
        objective(model(), turns=turns)


def test_states_with_a_bool_for_whose_turn_it_is_can_be_read() -> None:
    """As they were written before there could be several low-rank calls in a row."""
    for is_low in (True, False):
        joint = objective(model())
        joint.load_state_dict({**joint.state_dict(), "turn": {"low": is_low, "norms": {"0": 1.0, "4": 1.0}}})
        assert math.isnan(float(call(joint, BATCHES[0]).full)) == is_low


@pytest.mark.parametrize("balance", [0.3, 0.5, 1.0])
def test_a_full_turn_is_the_plain_gradient_times_two_shares(balance: float) -> None:
    net = model()
    call(objective(net, balance=balance), BATCHES[0])
    got = gradients(net)
    net = model()
    F.cross_entropy(net(BATCHES[0][0]), BATCHES[0][1]).backward()
    for one, other in zip(got, gradients(net), strict=True):
        assert torch.allclose(one, 2 * (1 - balance) * other, atol=1e-7)


@pytest.mark.parametrize("balance", [0.3, 0.5])
def test_a_low_turn_is_scaled_to_the_running_norms(balance: float) -> None:
    """0.9 of what was and 0.1 of what came, per kernel; vectors are not scaled."""
    net = model()
    joint = objective(net, balance=balance, ratio=0.3)
    norms = None
    for number in range(6):
        net.zero_grad()
        call(joint, BATCHES[number])
        kernels = [net[0].weight, net[4].weight]
        if number % 2 == 0:
            found = [float(k.grad.norm()) / (2 * (1 - balance)) for k in kernels]
            norms = found if norms is None else [0.9 * n + 0.1 * f for n, f in zip(norms, found, strict=True)]
        else:
            assert norms is not None
            got = [float(k.grad.norm()) for k in kernels]
            assert got == pytest.approx([2 * balance * n for n in norms], rel=1e-5)
    twin = model()
    both = dn.JointObjective(twin, ratio=0.3, balance=1.0, seed=0)
    twin.load_state_dict(net.state_dict())
    call(both, BATCHES[5])
    for one, other in zip((net[1].bias, net[4].bias), (twin[1].bias, twin[4].bias), strict=True):
        assert torch.allclose(one.grad, 2 * balance * other.grad, atol=1e-6)


def test_accumulation_over_two_calls_mixes_both() -> None:
    net = model()
    joint = objective(net)
    call(joint, BATCHES[0])
    full = gradients(net)
    call(joint, BATCHES[0])
    both = gradients(net)
    reference = model()
    call(dn.JointObjective(reference, ratio=(0.1, 0.6), seed=0), BATCHES[0])
    # One batch for both, and the first norms: twice the joint gradient of the paper.
    for one, other in zip(both, gradients(reference), strict=True):
        assert torch.allclose(one, 2 * other, atol=1e-6)
    assert any(not torch.allclose(a, b) for a, b in zip(full, both, strict=True))


def test_the_teacher_takes_no_gradient_and_leaves_buffers_alone() -> None:
    net = model().train()
    joint = objective(net, distill=1.0)
    modes = []

    def forward(one: nn.Module) -> torch.Tensor:
        modes.append((torch.is_grad_enabled(), one is net))
        return one(BATCHES[0][0])

    joint.backward(forward=forward, loss=lambda out: F.cross_entropy(out, BATCHES[0][1]))
    after_full = copy.deepcopy(dict(net.named_buffers()))
    joint.backward(forward=forward, loss=lambda out: F.cross_entropy(out, BATCHES[0][1]))
    assert modes == [(True, True), (False, False), (True, False)]
    assert all(torch.equal(value, after_full[name]) for name, value in net.named_buffers())


def test_distillation_in_turns_is_that_of_the_same_step() -> None:
    """With the weights unchanged and one batch, the teacher's pass gives what the full pass gave."""
    lows = []
    for turns in (True, False):
        joint = dn.JointObjective(model(), ratio=0.3, distill=0.7, turns=turns, seed=0)
        losses = call(joint, BATCHES[0])
        lows.append(call(joint, BATCHES[0]).low if turns else losses.low)
    assert torch.allclose(*lows)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"turns": 2},
        {"distill": 1.0, "refresh": 2, "ratio": None, "macs": (0.2, 0.7), "example_input": BATCHES[0][0]},
    ],
)
def test_resuming_is_exact(after: int, options: dict) -> None:
    def steps(net: nn.Module, joint: dn.JointObjective, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            call(joint, BATCHES[number])
            optimizer.step()

    def start() -> tuple[nn.Module, dn.JointObjective, torch.optim.Optimizer]:
        net = model()
        return net, objective(net, **options), torch.optim.SGD(net.parameters(), lr=0.1)

    whole = start()
    steps(*whole, range(6))
    first = start()
    steps(*first, range(after))
    second = start()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    steps(*second, range(after, 6))
    for name, value in whole[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name


def test_states_that_are_not_of_turns_are_refused() -> None:
    joint = objective(model())
    state = joint.state_dict()
    with pytest.raises(InvalidArgumentError, match="'turn'"):
        joint.load_state_dict({key: value for key, value in state.items() if key != "turn"})
    for turn in (
        {"low": -1, "norms": {}},
        {"low": "1", "norms": {}},
        {"low": True},
        {"low": True, "norms": None},
        None,
    ):
        with pytest.raises(InvalidArgumentError, match="allowed: what state_dict"):
            joint.load_state_dict({**state, "turn": turn})
    for norms in ({"x": 1.0}, {"0": -1.0}, {"0": "1"}, {"0": math.nan}):
        with pytest.raises(InvalidArgumentError, match="allowed: a state of this model"):
            joint.load_state_dict({**state, "turn": {"low": True, "norms": norms}})


def test_a_state_of_more_turns_can_be_read_by_an_objective_of_fewer() -> None:
    """As where a training had three low-rank calls after each full one, and now has one."""
    many, one = objective(model(), turns=3), objective(model())
    call(many, BATCHES[0])
    one.load_state_dict(many.state_dict())
    kinds = [math.isfinite(float(call(one, BATCHES[number % 6]).full)) for number in range(6)]
    assert kinds == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    "wrong", [{"bases": {"age": -1}}, {"bases": None}, {"generator": torch.zeros(3)}, {"generator": 1}]
)
def test_a_state_that_is_refused_changes_nothing(wrong: dict) -> None:
    joint, other = objective(model(), refresh=4), objective(model(), refresh=4, seed=5)
    for one in (joint, other):
        call(one, BATCHES[0])
    call(other, BATCHES[1])
    before = copy.deepcopy(joint.state_dict())
    with pytest.raises(InvalidArgumentError, match="allowed: what state_dict"):
        joint.load_state_dict({**other.state_dict(), **wrong})
    after = joint.state_dict()
    assert torch.equal(before["generator"], after["generator"])
    assert (before["turn"], before["bases"]) == (after["turn"], after["bases"])


@pytest.mark.parametrize("options", [{"distill": 1.0}, {"distill": 0.5}, {}], ids=str)
def test_equal_batches_that_count_a_fourth_each_are_one_batch(options: dict) -> None:
    """The same gradient, and the same running norms, whatever a call counts."""
    found = []
    for share in (1, 4):
        net = model()
        joint = objective(net, ratio=0.4, **options)
        for _ in range(2):  # a full one and a low-rank one
            net.zero_grad()
            turn = copy.deepcopy(joint.state_dict())
            for _ in range(share):
                joint.load_state_dict(turn)
                call(joint, BATCHES[0], weight=1 / share)
        found.append((gradients(net), joint.state_dict()["turn"]["norms"]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("weight", [0, -1.0, math.inf, math.nan, "1", None])
def test_a_weight_that_is_no_share_is_refused(weight: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"weight=.*; allowed: a number above 0"):
        call(objective(model()), BATCHES[0], weight=weight)


def test_a_scaler_whose_scale_changes_changes_nothing_else() -> None:
    found = []
    for scales in ((1.0, 1.0, 1.0, 1.0), (1024.0, 512.0, 2048.0, 64.0)):
        net = model()
        joint = objective(net)
        for number, scale in enumerate(scales):
            net.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            call(joint, BATCHES[number], scaler=scaler)
        found.append([g / scales[-1] for g in gradients(net)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_a_step_that_overflowed_leaves_the_running_norms_as_they_were() -> None:
    net = model()
    joint = objective(net)
    call(joint, BATCHES[0])
    before = joint.state_dict()["turn"]["norms"]
    joint._low_turns_left = 0
    joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=lambda out: out.sum() * math.inf)
    assert joint.state_dict()["turn"]["norms"] == before


def test_an_overflow_in_the_first_step_is_forgotten() -> None:
    """As a GradScaler that starts too high has it: nothing is learned from it, and nothing is spoilt."""
    net = model()
    joint = objective(net)
    joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=lambda out: out.sum() * math.inf)
    net.zero_grad()
    call(joint, BATCHES[1])  # the low-rank turn has no norm to be scaled to
    assert float(net[0].weight.grad.norm()) == 0
    assert joint.state_dict()["turn"]["norms"] == {}
    net.zero_grad()
    call(joint, BATCHES[2])
    first = float(net[0].weight.grad.norm())
    assert joint.state_dict()["turn"]["norms"]["0"] == pytest.approx(first, rel=1e-5)
    again = objective(model())
    again.load_state_dict(joint.state_dict())
    net.zero_grad()
    call(joint, BATCHES[3])
    assert float(net[0].weight.grad.norm()) == pytest.approx(first, rel=1e-5)


def test_a_failed_decomposition_is_an_ordinary_step(monkeypatch) -> None:
    net = model()
    joint = objective(net, balance=0.9)
    call(joint, BATCHES[0])
    net.zero_grad()

    def fail() -> None:
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(joint._bases, "of_current_weights", fail)
    with pytest.warns(UserWarning, match="ordinary full-rank step") as caught:
        call(joint, BATCHES[1])
    assert caught[0].filename == __file__
    got = gradients(net)
    net.zero_grad()
    F.cross_entropy(net(BATCHES[1][0]), BATCHES[1][1]).backward()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(got, gradients(net), strict=True))


def test_without_a_low_rank_network_every_turn_is_plain_training() -> None:
    net = model()
    joint = objective(net, balance=0.0)
    for number in (0, 1):
        net.zero_grad()
        losses = call(joint, BATCHES[number])
        assert math.isnan(float(losses.low))
    got = gradients(net)
    net.zero_grad()
    F.cross_entropy(net(BATCHES[1][0]), BATCHES[1][1]).backward()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(got, gradients(net), strict=True))


def test_a_call_that_raised_was_no_turn() -> None:
    net = model()
    joint = objective(net)

    def broken(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=broken)
    assert math.isfinite(float(call(joint, BATCHES[0]).full))
