import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.networks import Losses
from decomposable.elastic import ElasticOptions
from decomposable_edge.errors import InvalidArgumentError

GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [
    (torch.randn(8, 3, 6, 6, generator=GENERATOR), torch.randint(0, 4, (8,), generator=GENERATOR)) for _ in range(6)
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Flatten(), nn.Linear(160, 4))


def elastic(
    net: nn.Module, distance: object = None, refresh: int = 1, steps: int = 1000, **options: object
) -> dn.Elastic:
    """In turns, one by one, from trained weights, and nothing distilled."""
    chosen = {"macs": (0.3, 0.8), "low_steps_per_full": 1, "distill": 0.0, "refresh": refresh, **options}
    example = BATCHES[0][0][:1]
    return dn.Elastic(
        net, example_input=example, steps=steps, distance=distance, seed=0, options=ElasticOptions(**chosen)
    )  # type: ignore[arg-type]


def call(objective: dn.Elastic | dn.JointObjective, batch: tuple[torch.Tensor, torch.Tensor], **more: object) -> Losses:
    x, y = batch
    return objective.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y), **more)  # type: ignore[arg-type]


def joint_of(net: nn.Module, **options: object) -> dn.JointObjective:
    return dn.JointObjective(net, example_input=BATCHES[0][0][:1], seed=0, **options)  # type: ignore[arg-type]


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def test_full_and_low_rank_in_turn_and_a_field_says_which_ran() -> None:
    made = elastic(model())
    for number in range(6):
        losses = call(made, BATCHES[number])
        assert losses.ran == ("full" if number % 2 == 0 else "low")
        assert math.isnan(float(losses.low if number % 2 == 0 else losses.full))
        assert math.isfinite(float(losses.loss))
        assert ("macs" in losses.seen()) == (number % 2 == 1)


def test_several_low_rank_calls_after_each_full_one_and_at_the_end_one() -> None:
    made = elastic(model(), low_steps_per_full=3, steps=20, even=0.6)
    assert [call(made, BATCHES[number % 6]).ran[0] for number in range(20)] == [*"flllflllflllflflflfl"]


def test_with_none_every_step_has_both() -> None:
    made = elastic(model(), low_steps_per_full=0)
    losses = [call(made, BATCHES[number]) for number in range(3)]
    assert [each.ran for each in losses] == ["both"] * 3
    assert all(each.full.isfinite() and each.low.isfinite() and each.macs <= 0.8 for each in losses)


@pytest.mark.parametrize(
    "wrong",
    [
        {"low_steps_per_full": -1},
        {"low_steps_per_full": 1.5},
        {"macs": (0.5, 0.1)},
        {"macs": 0.5},
        {"smallest_share": 1.0},
        {"distill": 1.5},
        {"balance": -0.1},
        {"start": 2},
        {"even": "late"},
        {"refresh": 0},
        {"order": "sigma"},
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        elastic(model(), **wrong)
    assert {caught.value.option: caught.value.came} == wrong


@pytest.mark.parametrize("balance", [0.3, 0.5, 1.0])
def test_a_full_turn_is_the_plain_gradient_times_two_shares(balance: float) -> None:
    net = model()
    call(elastic(net, balance=balance), BATCHES[0])
    got = gradients(net)
    net = model()
    F.cross_entropy(net(BATCHES[0][0]), BATCHES[0][1]).backward()
    for one, other in zip(got, gradients(net), strict=True):
        assert torch.allclose(one, 2 * (1 - balance) * other, atol=1e-7)


@pytest.mark.parametrize("balance", [0.3, 0.5])
def test_a_low_turn_is_scaled_to_the_running_norms(balance: float) -> None:
    """0.9 of what was and 0.1 of what came, per kernel; vectors are not scaled."""
    net = model()
    joint = elastic(net, balance=balance, macs=(0.5, 0.5))
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
    both = joint_of(twin, macs=0.5, balance=1.0)
    twin.load_state_dict(net.state_dict())
    call(both, BATCHES[5])
    for one, other in zip((net[1].bias, net[4].bias), (twin[1].bias, twin[4].bias), strict=True):
        assert torch.allclose(one.grad, 2 * balance * other.grad, atol=1e-6)


def test_accumulation_over_two_calls_mixes_both() -> None:
    net = model()
    joint = elastic(net)
    call(joint, BATCHES[0])
    full = gradients(net)
    call(joint, BATCHES[0])
    both = gradients(net)
    reference = model()
    call(joint_of(reference, macs=(0.3, 0.8)), BATCHES[0])
    # One batch for both, and the first norms: twice the joint gradient of the paper.
    for one, other in zip(both, gradients(reference), strict=True):
        assert torch.allclose(one, 2 * other, atol=1e-6)
    assert any(not torch.allclose(a, b) for a, b in zip(full, both, strict=True))


def test_the_teacher_takes_no_gradient_and_leaves_buffers_alone() -> None:
    net = model().train()
    joint = elastic(net, distill=1.0)
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
    for low_steps in (1, 0):
        joint = elastic(model(), macs=(0.5, 0.5), distill=0.7, low_steps_per_full=low_steps)
        losses = call(joint, BATCHES[0])
        lows.append(call(joint, BATCHES[0]).low if low_steps else losses.low)
    assert torch.allclose(*lows)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"low_steps_per_full": 2},
        {"low_steps_per_full": 0, "refresh": 3},
        {"distill": 1.0, "refresh": 2, "smallest_share": 0.3},
        {"low_steps_per_full": 3, "steps": 6, "even": 0.5},
    ],
)
def test_resuming_is_exact(after: int, options: dict) -> None:
    def steps(net: nn.Module, joint: dn.Elastic, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            call(joint, BATCHES[number])
            optimizer.step()

    def start() -> tuple[nn.Module, dn.Elastic, torch.optim.Optimizer]:
        net = model()
        return net, elastic(net, **options), torch.optim.SGD(net.parameters(), lr=0.1)

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


def test_states_of_something_else_are_refused() -> None:
    made = elastic(model())
    state = made.state_dict()
    for name in state:
        with pytest.raises(InvalidArgumentError, match=f"'{name}'"):
            made.load_state_dict({key: value for key, value in state.items() if key != name})
    for wrong in ({"low_steps_left": -1}, {"low_steps_left": True}, {"step": "1"}, {"norms": None}, {"order": "x"}):
        with pytest.raises(InvalidArgumentError, match="allowed: what state_dict"):
            made.load_state_dict({**state, **wrong})
    for norms in ({"x": 1.0}, {"0": -1.0}, {"0": "1"}, {"0": math.nan}):
        with pytest.raises(InvalidArgumentError, match="allowed: a state of this model"):
            made.load_state_dict({**state, "norms": norms})


def test_a_state_of_more_low_rank_steps_can_be_read_by_a_training_of_fewer() -> None:
    many, one = elastic(model(), low_steps_per_full=3), elastic(model())
    call(many, BATCHES[0])
    one.load_state_dict(many.state_dict())
    assert [call(one, BATCHES[number % 6]).ran for number in range(6)] == ["low", "low", "low", "full", "low", "full"]


@pytest.mark.parametrize(
    "wrong", [{"bases": {"age": -1}}, {"bases": None}, {"generator": torch.zeros(3)}, {"generator": 1}]
)
def test_a_state_that_is_refused_changes_nothing(wrong: dict) -> None:
    joint, other = elastic(model(), refresh=4), elastic(model(), refresh=4)
    for one in (joint, other):
        call(one, BATCHES[0])
    call(other, BATCHES[1])
    before = copy.deepcopy(joint.state_dict())
    with pytest.raises(InvalidArgumentError, match="allowed: what state_dict"):
        joint.load_state_dict({**other.state_dict(), "networks": {**other.networks.state_dict(), **wrong}})
    after = joint.state_dict()
    for state in (before, after):
        state["generator"] = state["networks"].pop("generator").tolist()
    assert before == after


@pytest.mark.parametrize("options", [{"distill": 1.0}, {"distill": 0.5}, {}], ids=str)
def test_equal_batches_that_count_a_fourth_each_are_one_batch(options: dict) -> None:
    """The same gradient, and the same running norms, whatever a call counts."""
    found = []
    for share in (1, 4):
        net = model()
        joint = elastic(net, macs=(0.5, 0.5), **options)
        for _ in range(2):  # a full one and a low-rank one
            net.zero_grad()
            turn = copy.deepcopy(joint.state_dict())
            for _ in range(share):
                joint.load_state_dict(turn)
                call(joint, BATCHES[0], weight=1 / share)
        found.append((gradients(net), joint.state_dict()["norms"]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("weight", [0, -1.0, math.inf, math.nan, "1", None])
def test_a_weight_that_is_no_share_is_refused(weight: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"weight=.*; allowed: a number above 0"):
        call(elastic(model()), BATCHES[0], weight=weight)


def test_a_scaler_whose_scale_changes_changes_nothing_else() -> None:
    found = []
    for scales in ((1.0, 1.0, 1.0, 1.0), (1024.0, 512.0, 2048.0, 64.0)):
        net = model()
        joint = elastic(net)
        for number, scale in enumerate(scales):
            net.zero_grad()
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            call(joint, BATCHES[number], scaler=scaler)
        found.append([g / scales[-1] for g in gradients(net)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_a_step_that_overflowed_leaves_the_running_norms_as_they_were() -> None:
    net = model()
    joint = elastic(net)
    call(joint, BATCHES[0])
    before = joint.state_dict()["norms"]
    joint._low_steps_left = 0
    joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=lambda out: out.sum() * math.inf)
    assert joint.state_dict()["norms"] == before


def test_an_overflow_in_the_first_step_is_forgotten() -> None:
    """As a GradScaler that starts too high has it: nothing is learned from it, and nothing is spoilt."""
    net = model()
    joint = elastic(net)
    joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=lambda out: out.sum() * math.inf)
    net.zero_grad()
    call(joint, BATCHES[1])  # the low-rank turn has no norm to be scaled to
    assert float(net[0].weight.grad.norm()) == 0
    assert joint.state_dict()["norms"] == {}
    net.zero_grad()
    call(joint, BATCHES[2])
    first = float(net[0].weight.grad.norm())
    assert joint.state_dict()["norms"]["0"] == pytest.approx(first, rel=1e-5)
    again = elastic(model())
    again.load_state_dict(joint.state_dict())
    net.zero_grad()
    call(joint, BATCHES[3])
    assert float(net[0].weight.grad.norm()) == pytest.approx(first, rel=1e-5)


def test_a_failed_decomposition_is_an_ordinary_step(monkeypatch) -> None:
    net = model()
    joint = elastic(net, balance=0.9)
    call(joint, BATCHES[0])
    net.zero_grad()

    def fail() -> None:
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(joint.networks._bases, "of_current_weights", fail)
    with pytest.warns(UserWarning, match="ordinary full-rank step") as caught:
        call(joint, BATCHES[1])
    assert caught[0].filename == __file__
    got = gradients(net)
    net.zero_grad()
    F.cross_entropy(net(BATCHES[1][0]), BATCHES[1][1]).backward()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(got, gradients(net), strict=True))


def test_without_a_low_rank_network_every_turn_is_plain_training() -> None:
    net = model()
    joint = elastic(net, balance=0.0)
    for number in (0, 1):
        net.zero_grad()
        assert call(joint, BATCHES[number]).ran == "full"
    got = gradients(net)
    net.zero_grad()
    F.cross_entropy(net(BATCHES[1][0]), BATCHES[1][1]).backward()
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(got, gradients(net), strict=True))


def test_a_call_that_raised_was_no_turn() -> None:
    net = model()
    joint = elastic(net)

    def broken(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        joint.backward(forward=lambda n: n(BATCHES[0][0]), loss=broken)
    assert call(joint, BATCHES[0]).ran == "full"
