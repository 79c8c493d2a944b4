"""How a network is called, as a file stores it."""

import json

import pytest

from decomposable.network.calls import CallSignature, InputSpec, Slot, describe_call, read_call
from decomposable_edge.fields import Damaged, Fields

CALL = {
    "inputs": [
        {"name": "x", "entry": ["x"], "shape": [6], "dtype": "float32"},
        {"name": "k", "entry": [1, "k"], "shape": [2], "dtype": "int64", "values": [0, 7]},
    ],
    "args": [{"input": "x"}, {"list": [{"input": "k"}, {"value": 3}]}],
    "kwargs": {"flag": {"value": False}, "more": {"dict": {"a": {"tuple": [{"value": None}, {"input": "x"}]}}}},
}


def call_of(**fields):
    return read_call(Fields({"input": None, "call": {**CALL, **fields}}, "the file"))


def test_how_a_network_is_called_is_stored_as_an_addition(tmp_path):
    call = call_of()
    assert call.inputs["k"].values == (0, 7)
    assert call.entries["k"] == (1, "k")
    assert call.args == (Slot("x"), [Slot("k"), 3])
    assert call.kwargs == {"flag": False, "more": {"a": (None, Slot("x"))}}
    stored = json.loads(json.dumps(describe_call(call)))
    assert read_call(Fields(stored, "the file")) == call
    assert read_call(Fields({"input": None}, "the file")) is None
    default = CallSignature.with_first(InputSpec(shape=(3,), dtype="float32"))
    assert describe_call(default) == {"input": {"shape": [3], "dtype": "float32"}}  # as files have always had it
    assert read_call(Fields(describe_call(default), "the file")) == default


DEEP = {"value": 1}
for _ in range(40):
    DEEP = {"list": [DEEP]}


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": []},
        {"inputs": [CALL["inputs"][0]] * 2},
        {"inputs": [{**CALL["inputs"][0], "name": "a b"}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "shape": [2**40]}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "shape": [2**28]}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "dtype": "object"}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "values": [1, 0]}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "values": [0, 2**70]}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "entry": "x"}, CALL["inputs"][1]]},
        {"inputs": [{**CALL["inputs"][0], "entry": [1.5]}, CALL["inputs"][1]]},
        {"args": [{"input": "x"}]},
        {"args": [{"input": ["x"]}, {"input": "k"}]},
        {"args": [{"call": "os.system"}, *CALL["args"]]},
        {"args": [{"value": [1]}, *CALL["args"]]},
        {"args": [DEEP, *CALL["args"]]},
        {"args": 3},
        {"kwargs": []},
    ],
)
def test_a_wrong_call_in_a_file_is_refused(fields):
    with pytest.raises(Damaged):
        call_of(**fields)
