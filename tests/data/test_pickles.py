import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decomposable.data.pickles import load_plain
from decomposable_edge.errors import DataError

few = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the folder may be used again
)
ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)
PLAIN = {"data": ARRAY, "labels": [3, 300, 70_000, -1], "names": ["a.png", "é.png"], "none": None, "yes": True}


@pytest.fixture
def load(tmp_path):
    def load(content):
        file = tmp_path / "batch"
        file.write_bytes(content)
        return load_plain(file, limit=1_000_000)

    return load


def refused(load, content):
    """The one line that says why."""
    with pytest.raises(DataError) as caught:
        load(content)
    line = str(caught.value)
    assert "\n" not in line
    assert "batch: " in line
    assert len(line) < 600
    return line


def assert_same(loaded, expected):
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(loaded[key], value)


def test_a_pickle_as_python_2_wrote_it(load, python2_pickle):
    original = {b"data": ARRAY, b"labels": [3, 300, 70_000, -1], b"filenames": [b"a.png", b"b.png"]}
    content = python2_pickle(original)
    whole = pickle.loads(content, encoding="bytes")  # the writer of this test is right
    np.testing.assert_array_equal(whole.pop(b"data"), ARRAY)
    assert whole == {key: value for key, value in original.items() if key != b"data"}
    loaded = load(content)
    assert_same(loaded, {"data": ARRAY, "labels": [3, 300, 70_000, -1], "filenames": ["a.png", "b.png"]})
    assert loaded["data"].dtype == np.uint8


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_pickle_as_python_3_writes_it(load, protocol):
    assert_same(load(pickle.dumps(PLAIN, protocol)), PLAIN)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_keys_that_are_bytes_become_strings(load, protocol):
    assert load(pickle.dumps({b"labels": [1]}, protocol)) == {"labels": [1]}


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">i2", "<i4", ">u4", "<i8", ">i8", "<u8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_plain_type_and_both_orders(load, dtype, order):
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)
    loaded = load(pickle.dumps({"a": array}, 2))["a"]
    np.testing.assert_array_equal(loaded, array)
    assert loaded.dtype == array.dtype


def test_numpys_new_module_path_is_admitted(load, python2_pickle):
    content = python2_pickle({b"data": ARRAY})
    assert_same(load(content.replace(b"numpy.core.", b"numpy._core.")), {"data": ARRAY})


class Attack:
    """Its pickle calls `function` when loaded."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("function", [exec, eval, os.system, os.mkdir], ids=lambda function: function.__name__)
def test_nothing_is_called(load, tmp_path, protocol, function):
    trace = tmp_path / "trace"
    code = f"__import__('os').mkdir({str(trace)!r})"
    argument = {os.system: f"mkdir {trace}", os.mkdir: str(trace)}.get(function, code)
    content = pickle.dumps({"labels": Attack(function, argument)}, protocol)
    line = refused(load, content)
    assert not trace.exists()
    if protocol >= 2:
        assert function.__name__ in line
    pickle.loads(content)  # and it is an attack
    assert trace.exists()


GLOBALS = {
    b"cnumpy\nload\n": "numpy.load",
    b"cnumpy\nfromfile\n": "numpy.fromfile",
    b"cnumpy.core.multiarray\nscalar\n": "numpy.core.multiarray.scalar",
    b"cnumpy.core\nmultiarray._reconstruct\n": "numpy.core.multiarray._reconstruct",  # a dotted name
    b"c_codecs\ndecode\n": "_codecs.decode",
    b"cbuiltins\ngetattr\n": "builtins.getattr",
    b"c__builtin__\neval\n": "__builtin__.eval",
    b"cdecomposable.data.pickles\nload_plain\n": "decomposable.data.pickles.load_plain",
}


@pytest.mark.parametrize("code", GLOBALS, ids=GLOBALS.values())
def test_other_names_are_refused_by_name(load, code):
    assert f"the name '{GLOBALS[code]}'" in refused(load, b"\x80\x02" + code + b".")


RECONSTRUCT, NDARRAY, DTYPE = b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"
ENCODE = b"c_codecs\nencode\n"
EMPTY_ARRAY = RECONSTRUCT + NDARRAY + b"K\x00\x85U\x01b\x87R"
BYTES_TYPE = DTYPE + b"U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
# Only names that are admitted, used for what they are not.
ABUSES = {
    "an array of another class": RECONSTRUCT + DTYPE + b"K\x00\x85U\x01b\x87R",
    "an array that is a dict": RECONSTRUCT + b"}K\x00\x85U\x01b\x87R",
    "a huge empty array": RECONSTRUCT + NDARRAY + b"J\xff\xff\xff\x7f\x85U\x01b\x87R",
    "a call of ndarray": NDARRAY + b"J\xff\xff\xff\x7f\x85R",
    "objects": DTYPE + b"U\x02O8K\x00K\x01\x87R",
    "records": DTYPE + b"U\x05u1,O8K\x00K\x01\x87R",
    "a type by list": DTYPE + b"](U\x01aU\x01Oe\x85R",
    "a type with an alignment": BYTES_TYPE.replace(b"J\xff\xff\xff\xffK\x00tb", b"J\xff\xff\xff\xffK\x01tb"),
    "a type with fields": BYTES_TYPE.replace(b"NNN", b"N}N"),
    "an array with too few bytes": EMPTY_ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + BYTES_TYPE + b"\x89U\x01atb",
    "an array of negative size": EMPTY_ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + BYTES_TYPE + b"\x89U\x01atb",
    "an array of many dimensions": EMPTY_ARRAY + b"(K\x01(" + b"K\x01" * 9 + b"t" + BYTES_TYPE + b"\x89U\x01atb",
    "an array with a size that is True": EMPTY_ARRAY + b"(K\x01\x88\x85" + BYTES_TYPE + b"\x89U\x01atb",
    "an array without its state": b"}U\x01d" + EMPTY_ARRAY + b"s",
    "a state that is a list": EMPTY_ARRAY + b"]b",
    "a state for a list": b"]}b",
    "a state for a function": ENCODE + b"N}U\x0c__defaults__Ns\x86b",
    "a state for a class": NDARRAY + b"}U\x01aK\x01sb",
    "an encoding that inflates": ENCODE + b"U\x01aU\x03zip\x86R",
    "an encoding of bytes": ENCODE + b"C\x01aU\x06latin1\x86R",
    "a call of a string": b"U\x04evalU\x01a\x85R",
    "a call of what a call gave": BYTES_TYPE + b"U\x01a\x85R",
    "NEWOBJ": NDARRAY + b"J\xff\xff\xff\x7f\x85\x81",
    "NEWOBJ_EX": NDARRAY + b")}\x92",
    "INST": b"(inumpy\nndarray\n",
    "OBJ": b"(" + NDARRAY + b"K\x01o",
    "PERSID": b"Pname\n",
    "BINPERSID": b"U\x01aQ",
    "EXT1": b"\x82\x01",
    "DUP": b"]2",
    "POP": b"]]0",
    "FLOAT": b"G" + bytes(8),
    "NEXT_BUFFER": b"\x97",
    "BYTEARRAY8": b"\x96" + struct.pack("<Q", 1) + b"a",
    "a name as an entry": b"}U\x01d" + NDARRAY + b"s",
    "a type as an entry": b"}U\x01d" + BYTES_TYPE + b"s",
    "a key that is a tuple": b"})Ns",
    "a key that is an int": b"}K\x01Ns",
    "a list instead of a dict": b"]",
    "an item for no list": b"}K\x01a",
    "an entry for no dict": b"]U\x01aK\x01s",
    "two values": b"}}",
    "nothing": b"",
    "a mark": b"(",
    "no mark": b"}u",
    "a mark where a value should be": b"}(a",
    "a key without a value": b"}(U\x01au",
    "a cell that is empty": b"h\x05",
    "a name from the stack": b"U\x02osU\x06system\x93",
    "a name that is an int": b"K\x01K\x02\x93",
    "a length beyond the end": b"T\xff\xff\xff\x7fabc",
    "a negative length": b"T\xff\xff\xff\xffabc",
}


@pytest.mark.parametrize("code", ABUSES.values(), ids=ABUSES)
def test_admitted_names_and_instructions_cannot_be_abused(load, code):
    tracemalloc.start()
    try:
        refused(load, b"\x80\x02" + code + b".")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def long_memo():
    return b"\x80\x02}r\xff\xff\xff\x7f."  # the C unpickler allocates 32 GB here, and then succeeds


def encoded_again_and_again():
    text = b"X" + struct.pack("<I", 200_000) + b"a" * 200_000
    return (
        b"\x80\x02" + ENCODE + b"q\x00" + text + b"q\x01U\x06latin1q\x02](" + b"h\x00h\x01h\x02\x86R" * 10_000 + b"e."
    )


def arrays_of_one_string():
    text = b"T" + struct.pack("<I", 200_000) + b"a" * 200_000
    start = b"\x80\x02" + text + b"q\x00" + BYTES_TYPE + b"q\x01]("
    return start + (EMPTY_ARRAY + b"(K\x01J" + struct.pack("<i", 200_000) + b"\x85h\x01\x89h\x00tb") * 5_000 + b"e."


def key_that_takes_forever_to_hash():
    doubled = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(200))
    return b"\x80\x02})q\x00" + doubled + b"Ns."


def key_that_overflows_the_c_stack_when_hashed():
    return b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."


@pytest.mark.parametrize(
    "bomb",
    [
        encoded_again_and_again,
        arrays_of_one_string,
        key_that_takes_forever_to_hash,
        key_that_overflows_the_c_stack_when_hashed,
    ],
)
def test_bombs_do_not_go_off(load, bomb):
    tracemalloc.start()
    try:
        refused(load, bomb())
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_cell_of_a_huge_number_costs_nothing(load):
    tracemalloc.start()
    try:
        assert load(long_memo()) == {}
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_instructions_are_counted(load, monkeypatch):
    monkeypatch.setattr("decomposable.data.pickling.MOST_INSTRUCTIONS", 1000)
    assert "more than 1,000 instructions" in refused(load, b"\x80\x02" + b"}" * 2000 + b".")


def test_a_list_that_holds_itself_is_no_trouble(load):
    labels = []
    labels.append(labels)
    assert isinstance(load(pickle.dumps({"labels": labels}, 2))["labels"], list)


def test_files_too_large_are_not_read(tmp_path):
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps(PLAIN, 2))
    with pytest.raises(DataError, match="allowed: at most 10"):
        load_plain(file, limit=10)


def test_bytes_after_the_end_are_refused(load):
    assert "after the end" in refused(load, pickle.dumps(PLAIN, 2) + b"more")


@few
@given(st.binary(max_size=200))
def test_any_bytes_give_a_dict_or_one_line(load, content):
    check_any(load, content)


@few
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_changed_byte_gives_a_dict_or_one_line(load, place, value):
    content = bytearray(pickle.dumps(PLAIN, 2))
    content[place % len(content)] = value
    check_any(load, bytes(content))


@few
@given(st.integers(0, 10_000))
def test_a_truncated_pickle_gives_one_line(load, length):
    content = pickle.dumps(PLAIN, 2)
    refused(load, content[: length % len(content)])


def check_any(load, content):
    loaded, line = {}, ""
    try:
        loaded = load(content)
    except DataError as error:
        line = str(error)
    assert "\n" not in line
    assert all(isinstance(key, str) for key in loaded)
    assert all(isinstance(v, str | bytes | int | list | tuple | dict | np.ndarray | None) for v in loaded.values())
