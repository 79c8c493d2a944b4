"""Several processes on this machine, by gloo, against one that has the whole batch."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import decomposable as dn
from decomposable.core.bases import costs_of, owners_of, svd_cost
from decomposable.core.layers import find_layers
from decomposable.core.processes import ALONE
from decomposable.core.tree import data_parallel, unwrap
from refusals import Saying, refused

PROGRAM = Path(__file__).with_name("processes_at_work.py")
LIMIT = 240  # seconds until processes that hang are ended, and the test fails

_spec = importlib.util.spec_from_file_location("processes_at_work", PROGRAM)
work = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(work)

SAME = [
    *("plain", "wrapped", "group_norm", "uneven", "fewer_than_processes", "accumulated", "channels_last", "double"),
    *("budgets", "turns", "from_scratch", "scaled", "refreshed", "gradients"),
]
OTHERS = [
    *("resumed", "without_a_seed", "buffers", "unused", "raises", "svd_fails", "not_finite", "different"),
    *("own_group", "sharded"),
]


def started(names, count, folder: Path, *, codes=None):
    """What every process found in each scenario; they are ended, and the test fails, where they take too long."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
    store, out = folder / "store", folder
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), ",".join(names), str(i), str(count), str(store), str(out)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    ended = [process.returncode for process in running]
    assert ended == (codes or [0] * count), "\n".join(said)
    return {
        name: [
            torch.load(file) if (file := out / f"{name}-{i}.pt").exists() else None  # of a process that was killed
            for i in range(count)
        ]
        for name in names
    }


def _path() -> str:
    source = Path(dn.__file__).parents[1]
    return os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return started([*SAME, *OTHERS], 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return started([*SAME, *OTHERS], 4, tmp_path_factory.mktemp("four"))


def check_same(found, alone):
    for key, expected in alone.items():
        for one in found:
            assert torch.allclose(one[key].double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True), key
            if "losses" not in key:
                assert torch.equal(one[key], found[0][key]), f"{key} is not the same on all"


@pytest.mark.parametrize("name", SAME)
def test_two_processes_make_the_update_of_one_with_the_whole_batch(name, two):
    check_same(two[name], getattr(work, name)(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_so_do_four(name, four):
    check_same(four[name], getattr(work, name)(0, 1))


def check_others(found, count):
    for one in found["resumed"]:
        assert torch.equal(one["whole"], one["cut"])
        assert torch.equal(one["whole"], found["resumed"][0]["whole"])
    for one in found["without_a_seed"]:
        assert torch.equal(one["ratios"], found["without_a_seed"][0]["ratios"])
        assert len(set(one["ratios"].tolist())) == 3
    first, *rest = found["buffers"]
    for one in rest:
        assert torch.equal(one["before"], first["before"])  # as the last full pass begins
        assert not torch.equal(one["after"], first["after"])
    for one in found["unused"]:
        assert one["has"].tolist() == [True, True, False]
        assert torch.equal(one["first"], found["unused"][0]["first"])
    for i, one in enumerate(found["raises"]):
        by_itself = "ZeroDivisionError: out of luck"
        told = by_itself if i == 1 else f"OtherProcessError: process 1 of {count} failed: {by_itself}"
        assert one["told"] == [told, told]
        assert not one["has_gradient"]
        assert one["norm"] == found["raises"][0]["norm"] > 0
    for one in found["svd_fails"]:
        assert one["warned"] > 0
        assert (one["losses"][:, 2] == 1).all()
    for one in found["not_finite"]:
        assert one["told"].startswith("NonFiniteError: layer '3': its weight holds NaN")
    for one in found["different"]:
        assert one["told"].startswith(f"model: parameter '3.weight' is not the same on all {count} processes; allowed")
    assert [one["grads"] for one in found["own_group"]] == [5, *[0] * (count - 1)]
    for one in found["own_group"][:2]:
        assert one["told"] == "process_group: this process is not in it; allowed: a group that it is in"
    for one in found["sharded"]:
        assert len(one["told"]) == 2
        assert all("model: '0.weight' is sharded over processes (fully_shard, FSDP)" in text for text in one["told"])


def test_what_two_processes_do_besides(two):
    check_others(two, 2)


@pytest.mark.slow
def test_what_four_processes_do_besides(four):
    check_others(four, 4)


def test_a_step_without_an_svd_is_a_plain_one(two):
    """By hand: the mean of the gradients of all samples, which no low-rank network has a part in."""
    model = work.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in work.batches(8, 2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(two["svd_fails"][0][f"weight {name}"], parameter, atol=1e-5)


def test_a_process_that_dies_is_missed_by_the_others(tmp_path):
    found = started(["killed"], 2, tmp_path, codes=[0, 9])["killed"]
    assert found[0]["told"].startswith("LostProcessError: the other processes cannot be reached, perhaps one")


def test_a_process_alone_says_how_many_samples_it_has_if_it_likes():
    model = work.network()
    joint = dn.JointObjective(model)
    (x, y), *_ = work.batches(8, 1)
    joint.backward(lambda net: nn.functional.cross_entropy(net(x), y), samples=8)
    with refused("samples", 0, Saying("^an int of at least 1")):
        joint.backward(lambda net: nn.functional.cross_entropy(net(x), y), samples=0)


def test_decompositions_are_shared_out_by_their_cost():
    widths = [64] * 6 + [128] * 8 + [256] * 11 + [512] * 5
    costs = {f"{i}": svd_cost((3 * width, 3 * width)) for i, width in enumerate(widths)}
    for count in (2, 3, 4):
        owners = owners_of(costs, count)
        loads = [sum(costs[name] for name, owner in owners.items() if owner == i) for i in range(count)]
        assert max(loads) <= sum(loads) / count + max(costs.values())
        assert owners == owners_of(dict(reversed(costs.items())), count)
    assert set(owners_of(costs, 1).values()) == {0}


def test_what_a_layers_decomposition_costs_follows_from_its_form():
    conv = nn.Conv2d(4, 8, 3)
    costs = {
        form: costs_of(find_layers(nn.Sequential(conv), form)[0])["0"] for form in ("channel", "spatial", "tucker")
    }
    assert costs["channel"] == svd_cost((36, 8))
    assert costs["spatial"] == svd_cost((12, 24))
    assert costs["tucker"] == svd_cost((4, 72)) + svd_cost((8, 36))


def test_a_process_alone_talks_to_nobody():
    assert ALONE.is_first
    assert ALONE.anywhere([True, False]) == [True, False]
    assert ALONE.from_first([1.5]) == [1.5]
    assert ALONE.together(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        ALONE.together(lambda: 1 / 0)


def test_what_is_in_data_parallel_is_found(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        assert unwrap(wrapped) is model
        assert unwrap(torch.compile(wrapped)) is model
        assert data_parallel(torch.compile(wrapped)) is wrapped
        assert data_parallel(torch.compile(model)) is None
        net = dn.decompose(wrapped, example_input=torch.zeros(1, 3, 3, 3))
    finally:
        torch.distributed.destroy_process_group()
    assert set(net.plan().ranks) == {"0", "2"}


def test_synchronised_batch_normalisation_is_kept():
    """It has no training pass on a CPU; evaluating, sizes and the modules of a joint step are what there is to see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4))
    model[1].running_mean.normal_()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    x = torch.randn(5, 3, 3, 3)
    net = dn.decompose(converted, example_input=x)
    assert torch.allclose(net(x), model.eval()(x), atol=1e-5)
    net.calibrate_([torch.randn(8, 3, 3, 3)], sizes=[0.5])
    net.resize_(macs=0.5)
    kinds = {type(module).__name__ for module in net.extract().modules()}
    assert "SyncBatchNorm" in kinds

    converted.eval()
    joint = dn.JointObjective(converted, seed=0)
    seen = []

    def closure(network):
        seen.append([type(module).__name__ for module in network.modules()])
        return network(x).square().mean()

    joint.backward(closure)
    assert all("SyncBatchNorm" in names for names in seen)
    assert converted[1].weight.grad is not None
