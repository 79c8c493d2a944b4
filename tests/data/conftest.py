"""Fixtures for the data sets."""

import os
import struct
from pathlib import Path

import numpy as np
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


class Python2Pickler:
    """Pickles as Python 2's cPickle does with protocol 2, which wrote the original files."""

    def __init__(self):
        self.memo = 0

    def dumps(self, value):
        return b"\x80\x02" + self.save(value) + b"."

    def put(self, content):
        self.memo += 1
        small = self.memo <= 256
        return content + (b"q" + bytes([self.memo - 1]) if small else b"r" + struct.pack("<I", self.memo - 1))

    def save(self, value):
        match value:
            case None:
                return b"N"
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                if 0 <= value < 256:
                    return b"K" + bytes([value])
                return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
            case bytes():  # Python 2's str
                head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
                return self.put(head + value)
            case list():
                return self.put(b"]") + b"(" + b"".join(map(self.save, value)) + b"e"
            case tuple():
                inner = b"".join(map(self.save, value))
                return self.put(inner + bytes([0x84 + len(value)]) if len(value) <= 3 else b"(" + inner + b"t")
            case dict():
                items = b"".join(self.save(k) + self.save(v) for k, v in value.items())
                return self.put(b"}") + b"(" + items + b"u"
            case np.ndarray():
                empty = self.put(b"cnumpy\nndarray\n") + self.save((0,)) + self.save(b"b") + self.put(b"\x87")
                array = self.put(b"cnumpy.core.multiarray\n_reconstruct\n") + empty + self.put(b"R")
                code = value.dtype.str[1:].encode()
                dtype = self.put(b"cnumpy\ndtype\n") + self.save((code, 0, 1)) + self.put(b"R")
                order = {"|": b"|", "<": b"<", ">": b">"}[value.dtype.str[0]]
                dtype += self.save((3, order, None, None, None, -1, -1, 0)) + b"b"
                state = b"(" + self.save(1) + self.save(value.shape) + dtype + self.save(False)
                return array + state + self.save(value.tobytes()) + self.put(b"t") + b"b"
        raise TypeError(type(value))


@pytest.fixture
def python2_pickle():
    return lambda value: Python2Pickler().dumps(value)
