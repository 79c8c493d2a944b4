import numpy as np
import pytest
import torch

from decomposable import recipes
from decomposable.data import cifar
from decomposable.data.cifar import load_cifar10, load_cifar100
from decomposable.recipes import small
from decomposable.training.evaluation import accuracy
from decomposable.training.weights import load_weights_
from decomposable_edge.errors import DataError, InvalidArgumentError

LOADERS = {"cifar10": load_cifar10, "cifar100": load_cifar100}
CLASSES = {"cifar10": 10, "cifar100": 100}
FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
PARTS = {
    "cifar10": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
    "cifar100": ["train", "test"],
}


@pytest.fixture
def write(tmp_path):
    """Writes a small set in its original layout; the files and their (pixels, labels) come back."""

    def write(name, images=4):
        rng = np.random.default_rng(0)
        folder = tmp_path / FOLDERS[name]
        folder.mkdir()
        parts = {}
        for part in PARTS[name]:
            pixels = rng.integers(0, 256, (images, 3072), dtype=np.uint8)
            labels = rng.integers(0, CLASSES[name], images, dtype=np.uint8)
            coarse = rng.integers(0, 20, images, dtype=np.uint8)
            columns = [labels[:, None], pixels] if name == "cifar10" else [coarse[:, None], labels[:, None], pixels]
            file = folder / f"{part}.bin"
            file.write_bytes(np.concatenate(columns, axis=1).tobytes())
            parts[file] = pixels, labels
        return folder, parts

    return write


def refused(loader, folder):
    with pytest.raises(DataError) as caught:
        loader(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("in_parent", [False, True], ids=["the folder itself", "its parent"])
@pytest.mark.parametrize("name", LOADERS)
def test_what_is_loaded_is_what_was_written(write, name, in_parent):
    folder, parts = write(name)
    data = LOADERS[name](folder.parent if in_parent else str(folder))
    assert data.classes == CLASSES[name]
    *train, test = parts.values()
    for images, expected in ((data.train, train), (data.test, [test])):
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*expected, strict=True))
        np.testing.assert_array_equal(images.pixels.numpy(), pixels.reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(images.labels.numpy(), labels)
        assert (images.pixels.dtype, images.labels.dtype) == (torch.uint8, torch.int64)
    assert (data.train_count, data.test_count) == (4 * len(train), 4)


def test_a_test_batch_is_standardised(write):
    folder, _ = write("cifar10")
    data = load_cifar10(folder)
    x, y = data.test_batch(torch.tensor([2, 0]))
    mean, std = torch.tensor(cifar.CIFAR10_MEAN).view(3, 1, 1), torch.tensor(cifar.CIFAR10_STD).view(3, 1, 1)
    torch.testing.assert_close(x, (data.test.pixels[[2, 0]] / 255 - mean) / std)
    torch.testing.assert_close(y, data.test.labels[[2, 0]])


def test_a_mean_and_deviation_of_ones_own(write):
    folder, _ = write("cifar100")
    x, _ = load_cifar100(folder, mean=(0, 0, 0), std=(1, 1, 1)).test_batch(torch.arange(4))
    assert 0 <= x.min() < 0.1 < 0.9 < x.max() <= 1


@pytest.mark.parametrize(
    "wrong", [{"mean": (0.5,)}, {"std": (1, 1, 0)}, {"std": (1, 1)}, {"mean": (0, 0, float("nan"))}]
)
def test_a_mean_or_deviation_that_cannot_be(write, wrong):
    folder, _ = write("cifar10")
    with pytest.raises(InvalidArgumentError) as caught:
        load_cifar10(folder, **wrong)
    assert {caught.value.option: caught.value.came} == wrong


@pytest.mark.parametrize("name", LOADERS)
def test_without_a_folder_the_line_says_where_to_get_it(name):
    with pytest.raises(InvalidArgumentError) as caught:
        LOADERS[name](None)
    assert caught.value.option == "--data"
    assert cifar.SOURCE in caught.value.allowed


@pytest.mark.parametrize("name", LOADERS)
def test_folders_that_are_no_data_set(name, tmp_path):
    assert "no such folder" in refused(LOADERS[name], tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert "not a folder" in refused(LOADERS[name], file)
    (tmp_path / "train").mkdir()  # as ImageNet has it
    line = refused(LOADERS[name], tmp_path)
    assert FOLDERS[name] in line
    assert cifar.SOURCE in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "train"]


def test_missing_files_are_named(write):
    folder, parts = write("cifar10")
    third = list(parts)[2]
    third.unlink()
    assert f"without {third.name};" in refused(load_cifar10, folder)
    for file in list(parts)[3:]:
        file.unlink()
    line = refused(load_cifar10, folder)
    assert f"without {third.name}, data_batch_4.bin, data_batch_5.bin and 1 more;" in line
    assert cifar.SOURCE in line


def test_the_other_cifar_is_not_taken_for_this_one(write):
    folder, _ = write("cifar100")
    assert "no file of the binary version of CIFAR-10 " in refused(load_cifar10, folder)
    folder, _ = write("cifar10")
    assert "no file of the binary version of CIFAR-100 " in refused(load_cifar100, folder)


@pytest.mark.parametrize("length", [0, 1, 3072, 3074, 4 * 3073 - 1])
def test_truncated_and_foreign_binary_files(write, length):
    folder, parts = write("cifar10")
    file = list(parts)[1]
    file.write_bytes(bytes(length))
    line = refused(load_cifar10, folder)
    assert f"{file}: {length:,} bytes; allowed: 1 to 10,000 records of 3,073 bytes" in line


def test_a_file_with_more_images_than_the_original_is_refused(write):
    folder, parts = write("cifar10")
    file = list(parts)[1]
    with file.open("wb") as stream:
        stream.truncate(10_001 * 3073)  # takes no room on disk
    assert f"{file}: 30,733,073 bytes; allowed: 1 to 10,000 records" in refused(load_cifar10, folder)


@pytest.mark.parametrize(("name", "label"), [("cifar10", 10), ("cifar100", 100)])
def test_labels_out_of_range(write, name, label):
    folder, parts = write(name)
    file, record = next(iter(parts)), 3073 + (name == "cifar100")
    content = bytearray(file.read_bytes())
    content[2 * record + record - 3073] = label
    file.write_bytes(content)
    assert f"{file}: image 3 has label {label}; allowed: 0 to {label - 1}" in refused(LOADERS[name], folder)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("in_parent", [False, True], ids=["the folder itself", "its parent"])
def test_the_python_version_is_refused_with_the_one_to_take(tmp_path, name, in_parent):
    file = {"cifar10": "cifar-10-batches-py/data_batch_1", "cifar100": "cifar-100-python/train"}[name]
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    line = refused(LOADERS[name], tmp_path if in_parent else (tmp_path / file).parent)
    assert "not the python version, which is pickles" in line
    assert f"of {FOLDERS[name]};" in line
    assert cifar.SOURCE in line


def statistics(images):
    """Mean and deviation of every channel, by counting the bytes."""
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.pixels.unbind(1)]).double()
    value = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ value
    return mean, ((share @ value**2) - mean**2).sqrt()


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("cifar10", cifar.CIFAR10_MEAN, cifar.CIFAR10_STD),
        ("cifar100", cifar.CIFAR100_MEAN, cifar.CIFAR100_STD),
    ],
)
def test_the_full_sets(full_data, name, mean, std):
    data = LOADERS[name](full_data(FOLDERS[name]))
    assert (data.train_count, data.test_count) == (50_000, 10_000)
    assert data.train.labels.bincount().tolist() == [50_000 // CLASSES[name]] * CLASSES[name]
    assert data.test.labels.bincount().tolist() == [10_000 // CLASSES[name]] * CLASSES[name]
    measured_mean, measured_std = statistics(data.train)
    torch.testing.assert_close(measured_mean, torch.tensor(mean).double(), atol=6e-5, rtol=0)
    torch.testing.assert_close(measured_std, torch.tensor(std).double(), atol=6e-5, rtol=0)


def test_images_that_came_another_way_are_among_the_full_set(full_data, shared_data):
    with np.load(shared_data / "cifar10_ci_1k.npz") as other:
        images, labels = other["x_test"], other["y_test"]
    test = load_cifar10(full_data("cifar-10-batches-bin")).test
    label_of = {image.tobytes(): int(y) for image, y in zip(test.pixels.numpy(), test.labels, strict=True)}
    assert [label_of[image.tobytes()] for image in images] == labels.tolist()


def test_a_network_trained_elsewhere_reaches_its_stated_accuracy(full_data, shared_data):
    """Reading, standardising, the model, its weights and the count of hits, checked at once by a published figure."""
    task = recipes.make_task(small.cifar10_resnet20, full_data("cifar-10-batches-bin"), small.CIFAR10_RESNET20)
    model = task.build_model()
    load_weights_(model, shared_data / "resnet20-12fca82f.th")
    assert accuracy(model, task.load_data()) == pytest.approx(91.73, abs=0.005)
