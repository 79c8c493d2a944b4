import functools
import io

import pytest
import torch
from torch import nn

from decomposable.core.tree import clone_buffers_, deep_copy, plain_name, rewire, unwrap
from decomposable_edge.errors import UnsupportedModelError
from refusals import Saying, refused


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Net(nn.Module):
    """Reaches its layers in every way that people use besides attributes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)
        self.listed = [self.a, self.b]
        self.nested = {"deep": [(self.c, "name")]}
        self.method = self.d.forward
        self.partial = functools.partial(Net.run, layer=self.c)
        self.seen = []

    @staticmethod
    def run(x, layer):
        return layer(x)

    def forward(self, x):
        for layer in self.listed:
            x = layer(x)
        x = self.nested["deep"][0][0](x)
        return self.norm(self.partial(x) + self.method(x))


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return torch.full_like(x, self.value)


def test_a_copy_shares_every_tensor_and_no_module():
    model = Net()
    twin = rewire(model, {})
    assert [n for n, _ in twin.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(twin.buffers(), model.buffers(), strict=True))
    assert not set(twin.modules()) & set(model.modules())


def test_a_copy_computes_the_same():
    model, x = Net(), torch.randn(5, 4)
    torch.testing.assert_close(rewire(model, {})(x), model(x))


@pytest.mark.parametrize("place", ["a", "b", "c"])
def test_the_original_is_untouched(place):
    model, x = Net().eval(), torch.randn(5, 4)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    before = model(x)
    rewire(model, {getattr(model, place): Constant(0.0)})(x)
    assert torch.equal(model(x), before)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes


def test_a_replacement_is_reached_as_an_attribute():
    model = Net()
    new = Constant(1.0)
    twin = rewire(model, {model.a: new})
    assert twin.a is new
    assert dict(twin.named_modules())["a"] is new


def test_lists_lead_to_the_copy():
    model = Net()
    new = Constant(1.0)
    twin = rewire(model, {model.a: new})
    assert twin.listed == [new, twin.b]
    assert twin.b is not model.b


def test_dicts_with_tuples_in_lists_lead_to_the_copy():
    model = Net()
    new = Constant(1.0)
    assert rewire(model, {model.c: new}).nested == {"deep": [(new, "name")]}


def test_bound_methods_lead_to_the_copy():
    model = Net()
    twin = rewire(model, {})
    assert twin.method.__self__ is twin.d
    assert model.method.__self__ is model.d


def test_a_bound_method_of_a_replaced_module_becomes_the_method_of_its_replacement():
    model, x = Net(), torch.randn(5, 4)
    twin = rewire(model, {model.d: Constant(3.0)})
    assert (twin.method(x) == 3).all()


def test_partial_functions_lead_to_the_copy():
    model = Net()
    new = Constant(1.0)
    twin = rewire(model, {model.c: new})
    assert twin.partial.keywords == {"layer": new}
    assert model.partial.keywords == {"layer": model.c}


def test_hooks_that_are_methods_lead_to_the_copy():
    class Recorder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2))
            self.inner.register_forward_hook(self.record)
            self.output = None

        def record(self, module, args, output):
            self.output = output

        def forward(self, x):
            return self.inner(x)

    model = Recorder()
    twin = rewire(model, {model.inner[0]: Constant(3.0)})
    twin(torch.zeros(1, 2))
    assert model.output is None
    assert (twin.output == 3).all()


def test_a_module_used_twice_is_one_module_in_the_copy_too():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    twin = rewire(model, {})
    assert twin[0] is twin[2]
    new = Constant(1.0)
    twin = rewire(model, {shared: new})
    assert twin[0] is twin[2] is new


def test_the_root_itself_may_be_replaced():
    model, new = nn.Linear(2, 2), Constant(1.0)
    assert rewire(model, {model: new}) is new


def test_a_module_that_refers_to_its_parent_leads_to_the_copy():
    parent = nn.Sequential(nn.Linear(2, 2))
    parent[0].owner = [parent]  # in a list, so that it is not registered
    twin = rewire(parent, {})
    assert twin[0].owner[0] is twin


def test_a_list_without_modules_stays_the_same_list():
    model = Net()
    assert rewire(model, {}).seen is model.seen


def test_new_attributes_of_the_copy_do_not_reach_the_original():
    model = Net()
    twin = rewire(model, {})
    twin.extra = 3
    twin.register_buffer("late", torch.zeros(1))
    assert not hasattr(model, "extra")
    assert "late" not in dict(model.named_buffers())


def test_training_flags_are_those_of_the_original_and_then_its_own():
    model = Net()
    model.norm.eval()
    twin = rewire(model, {})
    assert (twin.training, twin.norm.training) == (True, False)
    twin.eval()
    assert model.training


def test_compiled_children_are_replaced_by_what_they_compile():
    inner = nn.Sequential(nn.Linear(3, 3))
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.ReLU())
    new = Constant(2.0)
    twin = rewire(model, {inner[0]: new})
    assert type(twin[0]) is nn.Sequential
    assert twin[0][0] is new
    assert (twin(torch.zeros(1, 3)) == 2).all()


def test_a_copy_of_a_module_compiled_in_place_runs_its_own_layers():
    model = nn.Sequential(nn.Linear(3, 3))
    model.compile(backend="eager")
    twin = rewire(model, {model[0]: Constant(2.0)})
    assert (twin(torch.zeros(1, 3)) == 2).all()


def test_unwrap_finds_the_module_behind_compile():
    model = nn.Linear(3, 3)
    assert unwrap(torch.compile(model, backend="eager")) is model
    assert unwrap(model) is model


@pytest.mark.parametrize("thing", [None, "model", lambda x: x, nn.Linear])
def test_what_is_no_module_is_refused(thing):
    with refused("model", type(thing).__name__, "a torch.nn.Module", kind=UnsupportedModelError):
        unwrap(thing)


def test_data_parallel_models_are_refused_with_what_to_do():
    with refused("model", "DataParallel", Saying(r"^its \.module"), kind=UnsupportedModelError):
        unwrap(nn.DataParallel(nn.Linear(3, 3)))


def test_torchscript_is_refused_with_what_to_do():
    with refused("model", "a TorchScript module", "the module before scripting", kind=UnsupportedModelError):
        unwrap(torch.jit.script(nn.Linear(3, 3)))


def test_plain_names_have_no_trace_of_compile():
    assert plain_name("_orig_mod.layer1._orig_mod.conv") == "layer1.conv"
    assert plain_name("layer1.conv") == "layer1.conv"
    assert plain_name("_orig_mod") == ""


def test_cloned_buffers_are_equal_and_apart():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    twin = rewire(model, {})
    clone_buffers_(twin)
    for own, original in zip(twin.buffers(), model.buffers(), strict=True):
        assert torch.equal(own, original)
        assert own is not original
    twin(torch.randn(8, 3) + 5)
    assert (model[0].running_mean == 0).all()
    assert (twin[0].running_mean != 0).all()


def test_a_buffer_held_twice_stays_one_buffer():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    twin = rewire(model, {})
    clone_buffers_(twin)
    assert twin[0].running_mean is twin[1].running_mean is not model[0].running_mean


def test_a_deep_copy_is_independent():
    model = Net()
    twin = deep_copy(model)
    with torch.no_grad():
        twin.a.weight.zero_()
    assert (model.a.weight != 0).any()
    assert twin.listed[0] is twin.a


def test_a_deep_copy_takes_outputs_that_a_forward_pass_left_behind():
    model = nn.Linear(3, 3)
    model.last = model(torch.ones(1, 3))
    twin = deep_copy(model)
    assert torch.equal(twin.last, model.last)
    assert not twin.last.requires_grad
    assert model.last.requires_grad


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(3, 3)
    model.log = io.TextIOWrapper(io.BytesIO())
    with refused("model", "Linear", kind=UnsupportedModelError):
        deep_copy(model)
