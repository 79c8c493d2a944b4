import builtins
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from decomposable.data import imagenet
from decomposable.data.augment import Standardise
from decomposable.data.base import TestBatches, TrainBatches
from decomposable_edge.errors import DataError, InvalidArgumentError, MissingExtraError
from refusals import Saying, refused

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

SIZES = [(40, 30), (30, 40), (64, 64), (25, 90)]
PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def smooth(width, height, seed=0):
    """An image that compresses like a photograph."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two classes, four images of each to train with and to test with."""
    folder = tmp_path_factory.mktemp("imagenet")
    for part in ("train", "val"):
        for number, name in enumerate(("n02", "n01")):
            (folder / part / name).mkdir(parents=True)
            for i, size in enumerate(SIZES):
                smooth(*size, seed=10 * number + i).save(folder / part / name / f"{name}_{i}.JPEG", quality=95)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(original, tmp_path / "imagenet")


def opened(file):
    with Image.open(file) as image:
        return image.convert("RGB")


def load(folder, **kwargs):
    return imagenet.load(folder, **{"size": 16, "resize": 20, **kwargs})


def refusal(folder, **kwargs):
    with pytest.raises(DataError) as caught:
        load(folder, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_and_labels_are_in_the_order_of_their_names(original):
    data = load(original)
    assert (data.classes, data.train_count, data.test_count) == (2, 8, 8)
    assert data.train.class_names == data.test.class_names == ("n01", "n02")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    expected = [original / "train" / name / f"{name}_{i}.JPEG" for name in ("n01", "n02") for i in range(4)]
    assert [data.train[i] for i in range(8)] == expected


def test_what_is_no_image_is_passed_over_and_every_extension_found(folder):
    place = folder / "train" / "n01"
    for name in ("a.jpg", "b.JPG", "c.png", "d.Webp", "e.bmp"):
        smooth(20, 20).save(place / name)
    for name in ("notes.txt", ".hidden.jpg", "._n01_0.JPEG"):
        (place / name).write_text("no image")
    (place / "folder.jpg").mkdir()
    (folder / "train" / ".cache").mkdir()
    (folder / "train" / "list.csv").write_text("")
    data = load(folder)
    assert data.train_count == 13
    assert {data.train[i].name for i in range(9)} >= {"a.jpg", "b.JPG", "c.png", "d.Webp", "e.bmp"}
    x, _ = data.train_batch(torch.arange(13), torch.Generator().manual_seed(0))
    assert x.shape == (13, 3, 16, 16)


def test_names_beyond_ascii(folder):
    smooth(20, 20).save(folder / "train" / "n01" / "été 猫.jpg")
    (folder / "train" / "n01").rename(folder / "train" / "ß")
    (folder / "val" / "n01").rename(folder / "val" / "ß")
    data = load(folder)
    assert data.train.class_names == ("n02", "ß")
    assert {data.train[i].name for i in range(9)} >= {"été 猫.jpg"}
    data.train_batch(torch.arange(9), torch.Generator())


def naive_test_image(file, resize, size):
    """Short side to `resize`, then the middle, by Pillow in two steps, as torchvision does it."""
    image = opened(file)
    short = min(image.size)
    image = image.resize([int(resize * side / short) for side in image.size], Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@pytest.mark.parametrize(("resize", "size"), [(20, 16), (64, 64), (51, 32), (200, 180)])
def test_test_images_are_resized_and_cut_in_the_middle(original, resize, size):
    data = load(original, resize=resize, size=size, **PLAIN)
    x, y = data.test_batch(torch.arange(8))
    assert y.tolist() == [0] * 4 + [1] * 4
    for i in range(8):
        expected = naive_test_image(data.test[i], resize, size).transpose(2, 0, 1)
        difference = np.abs(255 * x[i].numpy() - expected)
        assert difference.max() < 2.01  # both directions round
        assert difference.mean() < 0.3  # at such small sizes many values are halves, which may go either way


def test_test_images_are_standardised(original):
    x, _ = load(original).test_batch(torch.arange(8))
    plain, _ = load(original, **PLAIN).test_batch(torch.arange(8))
    torch.testing.assert_close(x, Standardise(imagenet.MEAN, imagenet.STD)(255 * plain))


def test_training_images_are_the_boxes_that_were_drawn(original):
    """With jitter and lighting turned off, against cropping first and resizing then."""
    data = load(original, **PLAIN)
    object.__setattr__(data, "augment", lambda x, generator: x)
    indices = torch.tensor([5, 0, 3, 3, 6])
    x, y = data.train_batch(indices, torch.Generator().manual_seed(4))
    sizes = torch.tensor([opened(data.train[i]).size for i in indices.tolist()])
    boxes = imagenet.random_boxes(sizes, torch.Generator().manual_seed(4))
    assert y.tolist() == [1, 0, 0, 0, 1]
    for image, i, box in zip(x, indices.tolist(), boxes.tolist(), strict=True):
        cropped = opened(data.train[i]).crop(box).resize((16, 16), Image.Resampling.BILINEAR)
        difference = np.abs(image.numpy().astype(int) - np.asarray(cropped, dtype=int).transpose(2, 0, 1))
        assert difference[:, 2:-2, 2:-2].max() <= 1  # at the edge, the filter sees what is beyond the box


def test_a_part_of_a_batch_is_as_in_the_whole_and_reads_no_other_image(original, monkeypatch):
    data = load(original)
    numbers = torch.tensor([5, 0, 3, 6, 1])
    whole, labels = data.train_batch(numbers, torch.Generator().manual_seed(4))
    read = []
    size_of = imagenet._size_of
    monkeypatch.setattr(imagenet, "_size_of", lambda file: read.append(file) or size_of(file))
    part = slice(1, 4)
    x, y = data.train_part(numbers, torch.Generator().manual_seed(4), part)
    assert torch.equal(x, whole[part])
    assert torch.equal(y, labels[part])
    assert read == [data.train[i] for i in numbers[part].tolist()]


def test_a_large_jpeg_decoded_small_is_nearly_the_same():
    content = io.BytesIO()
    smooth(1000, 801).save(content, "JPEG", quality=95)
    for box in ((0, 0, 1000, 801), (100, 50, 999, 801), (300, 300, 340, 340)):
        fast, exact = (
            np.asarray(imagenet._cut(Image.open(content), box, 60, draft), dtype=int) for draft in (True, False)
        )
        assert np.abs(fast - exact).max() <= 8
        assert np.abs(fast - exact).mean() < 1
    image = Image.open(content)
    imagenet._cut(image, (0, 0, 1000, 801), 60, True)
    assert image.size == (250, 201)  # it was decoded at a quarter


def colours(folder, mode, extension, **save):
    image = smooth(40, 30).convert("RGB")
    if mode == "P with transparency":
        image = image.quantize(256)
        save["transparency"] = bytes(range(256))
    else:
        image = image.convert(mode)
    file = folder / "val" / "n01" / f"n01_0{extension}"
    (folder / "val" / "n01" / "n01_0.JPEG").unlink()
    image.save(file, **save)
    return load(folder, size=30, resize=30, **PLAIN).test_batch(torch.tensor([0]))[0][0]


@pytest.mark.parametrize(
    ("mode", "extension", "tolerance"),
    [
        ("RGB", ".png", 1),
        ("RGBA", ".png", 1),
        ("L", ".JPEG", None),
        ("LA", ".png", None),
        ("1", ".png", None),
        ("CMYK", ".JPEG", 16),
        ("P", ".png", 60),
        ("P with transparency", ".png", 60),
        ("RGB", ".webp", 60),
        ("RGB", ".bmp", 1),
    ],
)
def test_every_mode_becomes_rgb(folder, mode, extension, tolerance):
    x = 255 * colours(folder, mode, extension).numpy()
    assert x.shape == (3, 30, 30)
    if tolerance is None:  # grey
        np.testing.assert_array_equal(x[0], x[1])
        np.testing.assert_array_equal(x[0], x[2])
        assert x.std() > 10
    else:
        expected = np.asarray(smooth(40, 30).crop((5, 0, 35, 30)), dtype=float).transpose(2, 0, 1)
        assert np.abs(x - expected).max() <= tolerance


def test_sixteen_bits_are_refused_and_not_made_white(folder):
    file = folder / "val" / "n01" / "n01_0.png"
    Image.fromarray(np.full((30, 30), 40_000, np.uint16)).save(file)
    data = load(folder)
    with refused(kind=DataError, path=file, reason=Saying("mode I.*8 bits per channel")):
        data.test_batch(torch.arange(8))


def test_same_generator_same_batch_and_no_other_counts(original):
    data = load(original)
    before = torch.get_rng_state(), random.getstate()
    first, labels = data.train_batch(torch.tensor([7, 2, 4]), torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(3)
    assert torch.equal(data.train_batch(torch.tensor([7, 2, 4]), torch.Generator().manual_seed(1))[0], first)
    assert not torch.equal(data.train_batch(torch.tensor([7, 2, 4]), torch.Generator().manual_seed(2))[0], first)
    assert labels.tolist() == [1, 0, 1]


def test_worker_processes_give_the_same_batches(original):
    data = load(original)
    batches = TrainBatches(data, batch_size=3, epochs=2, seed=0)
    for (x, y), (a, b) in zip(batches.loader(), batches.loader(workers=2), strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    assert torch.equal(torch.cat([y for _, y in TestBatches(data, batch_size=3)]), data.test.labels)


def test_it_can_be_pickled(original):
    data = load(original)
    copy = pickle.loads(pickle.dumps(data))
    assert [copy.train[i] for i in range(8)] == [data.train[i] for i in range(8)]


def test_names_take_little_memory(monkeypatch):
    names = [[f"n{c:08}_{i}.JPEG" for i in range(300)] for c in range(100)]
    monkeypatch.setattr(imagenet, "_image_names", lambda folder: next(found))
    found = iter(names)
    files = imagenet.ImageFiles(Path("folder"), [f"n{c:08}" for c in range(100)])
    assert len(pickle.dumps(files)) < 40 * len(files)


def test_folders_that_are_no_data_set(folder, tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        load(None)
    assert caught.value.option == "--data"
    assert imagenet.SOURCE in caught.value.allowed
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "not a folder" in refusal(folder / "train" / "n01" / "n01_0.JPEG")
    (folder / "val").rename(folder / "validation")
    line = refusal(folder)
    assert "no folder 'val' in it" in line
    assert imagenet.SOURCE in line


def test_images_that_are_not_sorted_into_classes(folder):
    for i in range(3):
        shutil.copy(folder / "train" / "n01" / "n01_0.JPEG", folder / f"ILSVRC2012_val_{i}.JPEG")
    shutil.rmtree(folder / "val")
    (folder / "val").mkdir()
    assert "val: no class folders" in refusal(folder)
    for file in folder.glob("*.JPEG"):
        file.rename(folder / "val" / file.name)
    assert "val: no class folders; allowed: one folder per class" in refusal(folder)


def test_classes_that_differ(folder):
    (folder / "val" / "n02").rename(folder / "val" / "n03")
    assert "only train has n02; only val has n03; allowed: the same class folders" in refusal(folder)
    for i in range(4, 9):
        shutil.copytree(folder / "val" / "n03", folder / "val" / f"n0{i}")
    assert "only val has n03, n04, n05 and 3 more" in refusal(folder)


def test_an_empty_class(folder):
    shutil.rmtree(folder / "val" / "n02")
    (folder / "val" / "n02").mkdir()
    (folder / "val" / "n02" / "readme.txt").write_text("")
    assert f"{folder / 'val' / 'n02'}: no image in it; allowed: at least one of .jpg" in refusal(folder)


def broken_files():
    content = io.BytesIO()
    smooth(40, 30).save(content, "JPEG")
    png = io.BytesIO()
    smooth(40, 30).save(png, "PNG")
    gif = io.BytesIO()
    smooth(40, 30).save(gif, "GIF")
    return {
        "empty": b"",
        "text": b"<html>404</html>",
        "a truncated JPEG": content.getvalue()[: len(content.getvalue()) // 2],
        "the header of a JPEG": content.getvalue()[:30],
        "a truncated PNG": png.getvalue()[:200],
        "a damaged PNG": png.getvalue()[:60] + b"\xff" * 40 + png.getvalue()[100:],
        "another format": gif.getvalue(),
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n",
    }


@pytest.mark.parametrize(("kind", "content"), broken_files().items(), ids=list(broken_files()))
def test_broken_images_are_named(folder, kind, content):
    for part in ("train", "val"):
        (folder / part / "n01" / "n01_2.JPEG").write_bytes(content)
    data = load(folder)
    for call in (
        lambda: data.test_batch(torch.arange(4)),
        lambda: data.train_batch(torch.arange(4), torch.Generator()),
    ):
        reason = Saying(r"^cannot be read as an image \(")
        with refused(kind=DataError, path=Saying("n01_2.JPEG$"), reason=reason):
            call()


@pytest.mark.slow
def test_a_batch_of_photographs_takes_the_memory_of_one(tmp_path):
    """Measured from outside: sixteen of 3000 × 2000 are 384 MB when all are decoded."""
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        smooth(3000, 2000).save(tmp_path / part / "a" / "0.jpg", quality=80)
        for i in range(1, 16):
            os.link(tmp_path / part / "a" / "0.jpg", tmp_path / part / "a" / f"{i}.jpg")
    code = """
import resource, sys, torch
from decomposable.data import imagenet
data = imagenet.load(sys.argv[1])
data.test_batch(torch.arange(1))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data.test_batch(torch.arange(16))
data.train_batch(torch.arange(16), torch.Generator())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 120_000  # kB: one original, and the batch itself


def test_an_image_of_absurd_size_is_refused_and_named(folder):
    """A decompression bomb: some kilobytes, said to be 100 million pixels."""
    image = Image.new("1", (10_000, 10_000))
    for part in ("train", "val"):
        image.save(folder / part / "n01" / "n01_2.png")
    data = load(folder)
    for call in (
        lambda: data.test_batch(torch.arange(5)),
        lambda: data.train_batch(torch.arange(5), torch.Generator()),
    ):
        reason = Saying(r"^cannot be read as an image \(Image size \(100000000")
        with refused(kind=DataError, path=Saying("n01_2.png$"), reason=reason):
            call()


def test_a_file_that_has_gone_is_named(folder):
    data = load(folder)
    data.test[3].unlink()
    with refused(kind=DataError, path=Saying("n01_3.JPEG$"), reason=Saying("^cannot be read")):
        data.test_batch(torch.arange(4))


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 21}, {"size": 300, "resize": 256}])
def test_sizes_that_cannot_be(original, wrong):
    with pytest.raises(InvalidArgumentError) as caught:
        load(original, **wrong)
    assert (caught.value.option, caught.value.came) == ("size", wrong["size"])


def test_missing_pillow_is_named_with_the_way_to_get_it(original, monkeypatch):
    importing = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "PIL":
            raise ImportError(name)
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"Pillow .*pip install .*'\.\[images\]'"):
        load(original)
