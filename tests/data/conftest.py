"""Fixtures for the data sets."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def full_data():
    """The folder with whole data sets; `full_data("cifar-10-batches-bin")` skips where that one is not in it."""

    def folder(name):
        place = os.environ.get("DECOMPOSABLE_DATA")
        if not place or not (Path(place) / name).is_dir():
            pytest.skip(f"no full data set: set DECOMPOSABLE_DATA to a folder with {name}")
        return Path(place)

    return folder
