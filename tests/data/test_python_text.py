import pytest
import torch

from decomposable.data import python_text
from decomposable.data.base import TestBatches, TrainBatches
from decomposable_edge.errors import DataError
from refusals import Saying, refused


@pytest.fixture
def library(tmp_path):
    for i in range(40):
        (tmp_path / f"module_{i}.py").write_bytes(bytes([65 + i % 26]) * 50)
    for folder in ("test", "site-packages", "sub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "more.py").write_text("x = 1\n" * 10)
    (tmp_path / "table.py").write_bytes(b"0" * (1 << 20) + b"0")
    return tmp_path


def test_files_are_in_order_and_those_of_others_left_out(library):
    names = [path.relative_to(library).as_posix() for path in python_text.files(library)]
    assert names == sorted(names)
    assert "sub/more.py" in names
    assert not any("test" in name or "site-packages" in name for name in names)


def test_the_parts_share_no_file(library):
    text = python_text.load(context=8, folder=library)
    held = {path.name for path in python_text.files(library) if python_text.is_held_out(path.relative_to(library))}
    assert 0 < len(held) < 20
    assert len(text.train) + len(text.test) == 40 * 50 + 60 + 40 - 1  # line breaks between files, of each part
    assert text.train.dtype == torch.uint8


def test_labels_are_the_bytes_that_follow(library):
    text = python_text.load(context=8, folder=library)
    x, y = text.test_batch(torch.arange(2))
    assert x.shape == y.shape == (2, 8)
    assert torch.equal(x[0, 1:], y[0, :-1])
    assert text.test_count == (len(text.test) - 1) // 8
    few = python_text.load(context=8, folder=library, most=5, most_test=4)
    assert (few.train_count, few.test_count) == (5, 4)
    assert torch.equal(few.test_batch(torch.arange(4))[0][0], x[0])


def test_every_window_lies_in_the_text(library):
    text = python_text.load(context=8, folder=library)
    last = torch.arange(text.train_count)
    for seed in range(5):
        x, y = text.train_batch(last, torch.Generator().manual_seed(seed))
        assert x.shape == y.shape == (text.train_count, 8)
    again = [text.train_batch(last[:3], torch.Generator().manual_seed(1))[0] for _ in range(2)]
    assert torch.equal(*again)
    assert len(TrainBatches(text, batch_size=2, epochs=1, seed=0)[0]) == len(TestBatches(text, batch_size=2)[0]) == 2


def test_an_empty_folder_is_refused(tmp_path):
    with refused(kind=DataError, path=tmp_path, reason=Saying("allowed: the standard library")):
        python_text.load(folder=tmp_path)


def test_there_is_a_text_on_every_machine():
    text = python_text.load()
    assert text.train_count > 10_000
    assert 0.02 < text.test_count / text.train_count < 0.5
