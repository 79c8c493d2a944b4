import builtins
import pickle

import pytest
import torch

from decomposable.data import digits
from decomposable_edge.errors import InvalidArgumentError, MissingExtraError


def test_the_data_set_is_the_split_of_load():
    data, split = digits.load_data(train_images=300, seed=1), digits.load(train_images=300, seed=1)
    assert (data.classes, data.train_count, data.test_count) == (10, 300, 1497)
    x, y = data.train_batch(torch.arange(300), torch.Generator())
    torch.testing.assert_close(x, split.train.tensors[0], rtol=0, atol=0)
    torch.testing.assert_close(y, split.train.tensors[1])
    x, y = data.test_batch(torch.tensor([5, 3]))
    torch.testing.assert_close(x, split.test.tensors[0][[5, 3]], rtol=0, atol=0)


def test_it_can_be_sent_to_worker_processes():
    data = pickle.loads(pickle.dumps(digits.load_data()))
    assert data.train_batch(torch.arange(3), torch.Generator())[0].shape == (3, 1, 8, 8)


def test_nothing_is_drawn():
    generator = torch.Generator()
    before = generator.get_state()
    digits.load_data().train_batch(torch.arange(3), generator)
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("wrong", [{"train_images": 9}, {"train_images": 1788}, {"seed": -1}, {"seed": 2**32}])
def test_wrong_arguments(wrong):
    with pytest.raises(InvalidArgumentError) as caught:
        digits.load_data(**wrong)
    assert {caught.value.option: caught.value.came} == wrong


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"scikit-learn .*pip install .*'\.\[demo\]'"):
        digits.load_data()
