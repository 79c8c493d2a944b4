"""What each of some processes does in the tests of `test_processes.py`, which starts them:

python processes_at_work.py SCENARIO,SCENARIO INDEX COUNT STORE OUT

A process alone, of which the tests run the same functions, is what the others are compared with.
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import decomposable as dn
from decomposable.core import bases
from decomposable.elastic import ElasticOptions

SECONDS = 60  # that a process waits for the others


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 5),
    )


def batches(size: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 8, 8, generator=generator), torch.randint(0, 5, (size,), generator=generator))
        for _ in range(steps)
    ]


def train(index, count, *, model=None, size=8, steps=4, ddp=False, split=True, weight=None, **options):
    """A few steps of SGD with the part of every batch that this process has; the losses come back, too."""
    model = network() if model is None else model
    around = DistributedDataParallel(model) if ddp and count > 1 else model
    if "options" in options:
        joint = dn.Elastic(around, example_input=torch.zeros(1, 3, 8, 8), steps=steps, seed=3, **options)
    else:
        joint = dn.JointObjective(around, seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for x, y in batches(size, steps):
        part = slice(index * size // count, (index + 1) * size // count) if split else slice(None)
        optimizer.zero_grad()
        seen.append(step(joint, x[part], y[part], weight))
        optimizer.step()
    return result(model, seen, joint)


def step(joint, x, y, weight=None):
    more = {} if len(x) else {"samples": 0}
    if weight is not None:
        more["weight"] = weight
    if isinstance(joint, dn.Elastic):
        return joint.backward(forward=lambda net: net(x), loss=lambda out: F.cross_entropy(out, y), **more)
    return joint.backward(lambda net: F.cross_entropy(net(x), y), **more)


def result(model, seen, joint=None):
    found = {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    numbers = [[float(losses.full), float(losses.low), losses.ratio, losses.macs] for losses in seen]
    found["losses"] = torch.tensor(numbers, dtype=torch.float64)
    if joint is not None:
        state = joint.state_dict()
        found["generator"] = state.get("networks", state)["generator"]
    return found


def plain(index, count):
    return train(index, count)


def wrapped(index, count):
    return train(index, count, ddp=True)


def group_norm(index, count):
    return train(index, count, model=network(norm=True), ddp=True)


def uneven(index, count):
    return train(index, count, size=7)


def fewer_than_processes(index, count):
    return train(index, count, size=1)


def accumulated(index, count):
    return train(index, count, weight=0.25)


def channels_last(index, count):
    return train(index, count, model=network().to(memory_format=torch.channels_last))


def double(index, count):
    model = network().double()
    torch.set_default_dtype(torch.float64)
    try:
        return train(index, count, model=model)
    finally:
        torch.set_default_dtype(torch.float32)


def budgets(index, count):
    return train(index, count, macs=(0.15, 0.6), example_input=torch.zeros(1, 3, 8, 8), size=6)


def turns(index, count):
    options = ElasticOptions(macs=(0.15, 0.6), low_steps_per_full=2, refresh=3)
    return train(index, count, ddp=True, options=options, steps=8)


def from_scratch(index, count):
    """Plain steps, then both networks in each, in the order that the first process finds."""
    data = [x for x, _ in batches(20, 16)]
    options = ElasticOptions(macs=(0.15, 0.6), refresh=3)
    return train(index, count, ddp=True, options=options, from_scratch=True, data=data, steps=6)


def scaled(index, count):
    """With a GradScaler; one step overflows on the first process alone, and is skipped by all."""
    model = network()
    options = ElasticOptions(low_steps_per_full=1, distill=0.0, macs=(0.15, 0.6))
    joint = dn.Elastic(model, example_input=torch.zeros(1, 3, 8, 8), steps=100, seed=3, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, (x, y) in enumerate(batches(8, 4)):
        x, y = (t[index * 8 // count : (index + 1) * 8 // count] for t in (x, y))
        if number == 2 and index == 0:
            x = x * torch.inf
        optimizer.zero_grad()
        joint.backward(forward=lambda net, x=x: net(x), loss=lambda out, y=y: F.cross_entropy(out, y), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    found = {f"weight {name}": parameter.detach() for name, parameter in model.named_parameters()}
    return {**found, "scale": torch.tensor(scaler.get_scale())}


def refreshed(index, count):
    return train(index, count, refresh=3, steps=7)


def gradients(index, count):
    """∇_f and ∇ as they are."""
    joint = dn.JointObjective(network(), seed=3)
    ((x, y),) = batches(8, 1)
    part = slice(index * 8 // count, (index + 1) * 8 // count)
    full, low = joint.gradients(lambda net: F.cross_entropy(net(x[part]), y[part]))
    return {f"{kind} {i}": g for kind, all_ in (("full", full), ("low", low)) for i, g in enumerate(all_.values())}


def resumed(index, count):
    """Cut off in the middle, with bases that are kept and turns: the same bits as one that was not."""
    chosen = ElasticOptions(low_steps_per_full=2, refresh=4, macs=(0.15, 0.6))
    options = {"example_input": torch.zeros(1, 3, 8, 8), "steps": 100, "seed": 3, "options": chosen}
    both = []
    for is_cut in (False, True):
        model = network()
        joint = dn.Elastic(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x, y) in enumerate(batches(8, 8)):
            if is_cut and number == 5:
                state = joint.state_dict()
                joint = dn.Elastic(model, **options)
                joint.load_state_dict(state)
            optimizer.zero_grad()
            step(joint, *(t[index * 8 // count : (index + 1) * 8 // count] for t in (x, y)))
            optimizer.step()
        both.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return {"whole": both[0], "cut": both[1]}


def without_a_seed(index, count):
    """Every process has another one, and they agree all the same."""
    model = network()
    torch.manual_seed(100 + index)
    joint = dn.JointObjective(model)
    (x, y), *_ = batches(8, 1)
    seen = [joint.backward(lambda net: F.cross_entropy(net(x), y)) for _ in range(3)]
    return {"ratios": torch.tensor([losses.ratio for losses in seen])}


def buffers(index, count):
    """Batch normalisation has the statistics of its own part of the batch, and the first one's on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
    joint = dn.JointObjective(model, seed=0)
    for x, y in batches(8, 2):
        x, y = (t[index * 8 // count : (index + 1) * 8 // count] for t in (x, y))
        seen = []

        def closure(net, x=x, y=y, seen=seen):
            seen.append(model[1].running_mean.clone())
            return F.cross_entropy(net(x), y)

        joint.backward(closure)
    return {"before": seen[0], "after": model[1].running_mean}


class _Branches(nn.Module):
    """Its first process uses one layer, the others another, and nobody a third."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.layers[min(self.index, 1)](x)


def unused(index, count):
    torch.manual_seed(0)
    model = _Branches(index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dn.JointObjective(model, seed=0).backward(lambda net: net(torch.ones(2, 4)).square().mean())
    grads = [layer.weight.grad for layer in model.layers]
    return {"has": torch.tensor([g is not None for g in grads]), "first": grads[0]}


def raises(index, count):
    """A closure that fails on one process fails on all; the next step is as if nothing had been."""
    model = network()
    joint = dn.JointObjective(model, seed=3)
    (x, y), *_ = batches(8, 1)
    told = []
    for place in (1, 2):  # in the pass of the full network, and in that of the low-rank one
        calls = []

        def closure(net, calls=calls, place=place):
            calls.append(net)
            if index == 1 and len(calls) == place:
                raise ZeroDivisionError("out of luck")
            return F.cross_entropy(net(x), y)

        try:
            joint.backward(closure)
        except (ZeroDivisionError, dn.DecomposableError) as error:
            told.append(f"{type(error).__name__}: {error}")
    has_gradient = any(p.grad is not None for p in model.parameters())
    joint.backward(lambda net: F.cross_entropy(net(x), y))
    return {"told": told, "has_gradient": has_gradient, "norm": float(model[0].weight.grad.norm())}


def svd_fails(index, count):
    """Where one has no SVD, the step is a full-rank one on all."""
    plain = bases.decomposed

    def failing(layers):
        if index == count - 1:
            raise torch.linalg.LinAlgError("it did not converge")
        return plain(layers)

    bases.decomposed = failing
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(index, count, steps=2)
    finally:
        bases.decomposed = plain
    return {**found, "warned": sum("ordinary full-rank step" in str(w.message) for w in caught)}


def not_finite(index, count):
    """A weight without a number is named on every process, though one of them decomposes it."""
    model = network()
    joint = dn.JointObjective(model, seed=3)
    (x, y), *_ = batches(8, 1)
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = torch.nan
    try:
        joint.backward(lambda net: F.cross_entropy(net(x), y))
    except dn.DecomposableError as error:
        return {"told": f"{type(error).__name__}: {error}"}


def different(index, count):
    model = network()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] += index
    (x, y), *_ = batches(8, 1)
    try:
        dn.JointObjective(model).backward(lambda net: F.cross_entropy(net(x), y))
    except dn.DecomposableError as error:
        return {"told": str(error)}


def own_group(index, count):
    """A group of one is a process alone: nothing is averaged, and the others are not waited for."""
    groups = [dist.new_group([i]) for i in range(count)]
    model = network()
    (x, y), *_ = batches(8, 1)
    if index == 0:
        dn.JointObjective(model, seed=3, process_group=groups[0]).backward(lambda net: F.cross_entropy(net(x), y))
    try:
        dn.JointObjective(model, process_group=groups[1 - min(index, 1)])
        told = ""
    except dn.DecomposableError as error:
        told = str(error)
    return {"grads": sum(p.grad is not None for p in model.parameters()), "told": told}


def sharded(index, count):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(network(), mesh=init_device_mesh("cpu", (count,)))
    told = []
    for make in (dn.JointObjective, lambda model: dn.decompose(model, example_input=torch.zeros(1, 3, 8, 8))):
        try:
            make(model)
        except dn.DecomposableError as error:
            told.append(str(error))
    return {"told": told}


def killed(index, count):
    """One process dies in the middle of a step; the others say so, and do not wait."""
    joint = dn.JointObjective(network(), seed=3)
    (x, y), *_ = batches(8, 1)
    joint.backward(lambda net: F.cross_entropy(net(x), y))
    if index == 1:
        os._exit(9)
    try:
        joint.backward(lambda net: F.cross_entropy(net(x), y))
    except dn.DecomposableError as error:
        return {"told": f"{type(error).__name__}: {error}"}


def main() -> None:
    names, index, count, store, out = sys.argv[1:]
    index, count = int(index), int(count)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=index, world_size=count, timeout=timedelta(seconds=SECONDS)
    )
    for name in names.split(","):
        torch.save(globals()[name](index, count), Path(out) / f"{name}-{index}.pt")
    if name == "killed":
        os._exit(0)  # what was told is written; PyTorch's own end of a broken group may abort the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
