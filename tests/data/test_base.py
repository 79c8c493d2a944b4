import itertools
import os
import pickle
import random
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from decomposable.data.augment import PadCropFlip, Standardise
from decomposable.data.base import FromDatasets, Images, InMemory, TestBatches, TrainBatches, generator_for
from decomposable_edge.errors import DataError, InvalidArgumentError

STANDARDISE = Standardise((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def in_memory(train=23, test=10):
    generator = torch.Generator().manual_seed(0)

    def images(count):
        pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
        return Images(pixels, torch.arange(count))  # a label is the number of the image

    return InMemory(
        classes=100, train=images(train), test=images(test), augment=PadCropFlip(STANDARDISE), prepare=STANDARDISE
    )


class Noisy(Dataset):
    """Draws from all three global generators, as transforms do."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002
        return torch.tensor([index, *noise], dtype=torch.float64), index % 3


def same(first, second):
    return all(torch.equal(x, a) and torch.equal(y, b) for (x, y), (a, b) in zip(first, second, strict=True))


@pytest.fixture(params=["in memory", "from datasets"])
def data(request):
    noisy = Noisy()
    return in_memory() if request.param == "in memory" else FromDatasets(classes=3, train=noisy, test=noisy)


def test_every_epoch_has_every_image_once_in_an_order_of_its_own():
    batches = TrainBatches(in_memory(train=24), batch_size=6, epochs=3, seed=1)
    assert (batches.per_epoch, len(batches)) == (4, 12)
    labels = torch.stack([y for _, y in batches]).view(3, 24)
    assert all(sorted(epoch) == list(range(24)) for epoch in labels.tolist())
    assert len({tuple(epoch) for epoch in labels.tolist()}) == 3


def test_what_is_left_over_is_left_out():
    batches = TrainBatches(in_memory(train=23), batch_size=5, epochs=2, seed=1)
    seen = torch.stack([y for _, y in batches]).view(2, 20)
    assert all(len(set(epoch)) == 20 for epoch in seen.tolist())


def test_batches_follow_from_seed_and_number_alone(data):
    def batches(seed=1):
        return TrainBatches(data, batch_size=4, epochs=3, seed=seed)

    everything = list(batches().loader())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert same(batches().loader(), everything)
    assert same(batches().loader(start=5), everything[5:])
    alone = batches()
    assert same([alone[7], alone[0]], [everything[7], everything[0]])  # in any order
    assert not same(batches(seed=2).loader(), everything)
    assert not torch.equal(everything[0][0], everything[batches().per_epoch][0])


def test_batches_are_the_same_from_worker_processes(data):
    batches = TrainBatches(data, batch_size=4, epochs=2, seed=1)
    assert same(batches.loader(start=1, workers=2), list(batches.loader())[1:])


def test_global_generators_are_left_alone(data):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    list(TrainBatches(data, batch_size=4, epochs=2, seed=1).loader())
    if isinstance(data, InMemory):
        list(TestBatches(data, batch_size=4).loader())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002


def test_global_generators_are_put_back_where_a_transform_fails():
    class Failing(Noisy):
        def __getitem__(self, index):
            super().__getitem__(index)
            raise RuntimeError("broken")

    data = FromDatasets(classes=3, train=Failing(), test=Failing())
    state, python_state = torch.get_rng_state(), random.getstate()
    with pytest.raises(RuntimeError, match="broken"):
        data.train_batch(torch.arange(2), torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_one_generator_one_batch(data):
    def batch(seed):
        return data.train_batch(torch.tensor([3, 1, 4]), torch.Generator().manual_seed(seed))

    assert same([batch(0)], [batch(0)])
    assert not same([batch(0)], [batch(1)])


def test_a_test_set_comes_whole_and_in_order():
    data = in_memory(test=10)
    batches = TestBatches(data, batch_size=4)
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert same(batches.loader(workers=0), list(batches))
    torch.testing.assert_close(torch.cat([x for x, _ in batches]), STANDARDISE(data.test.pixels))
    with pytest.raises(IndexError):
        batches[3]


def test_numbers_end_with_the_last_batch():
    batches = TrainBatches(in_memory(train=8), batch_size=4, epochs=2, seed=0)
    for number in (-1, 4):
        with pytest.raises(IndexError):
            batches[number]


@pytest.mark.parametrize("batch_size", [0, 24, -1])
def test_batch_sizes_that_cannot_be(batch_size):
    with pytest.raises(InvalidArgumentError) as caught:
        TrainBatches(in_memory(train=23), batch_size=batch_size, epochs=1, seed=0)
    assert (caught.value.option, caught.value.came) == ("batch_size", batch_size)


def test_every_purpose_and_number_has_a_generator_of_its_own():
    names = itertools.product((0, 1), ("order", "augmentation"), range(20))
    assert len({generator_for(*name).initial_seed() for name in names}) == 80


def test_a_data_set_can_be_pickled():
    data = in_memory()
    copy = pickle.loads(pickle.dumps(data))
    generator = torch.Generator().manual_seed(0)
    first = data.train_batch(torch.arange(3), generator)
    assert same([copy.train_batch(torch.arange(3), generator.manual_seed(0))], [first])


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="no SIGCHLD on this system")
def test_a_handler_of_child_processes_stays_the_programs_own():
    """Torch's would raise the death of a worker in the middle of anything."""
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGCHLD)
        loader = iter(TestBatches(in_memory(), batch_size=2).loader(workers=1))
        next(loader)
        assert signal.getsignal(signal.SIGCHLD) is mine
        loader.close()
        assert signal.getsignal(signal.SIGCHLD) is mine
    finally:
        signal.signal(signal.SIGCHLD, before)


class Deadly(Dataset):
    """End the worker process that asks for the second sample, as a system does when its memory is full."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2), 0


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.slow  # torch looks every five seconds
def test_the_death_of_a_worker_is_said_where_its_batch_is_waited_for():
    data = FromDatasets(classes=2, train=Deadly(), test=Deadly())
    with pytest.raises(DataError, match="worker process"):
        list(TestBatches(data, batch_size=1).loader(workers=1))
