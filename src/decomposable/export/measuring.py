"""Timing the sizes of a decomposed network, in PyTorch or in ONNX Runtime, on so many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from decomposable.export.graph import to_onnx
from decomposable.export.interface import Interface
from decomposable.export.quiet import refusing
from decomposable.network.calls import CallSignature, InputSpec
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.sizing.latency import Entry
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.rounding import DEFAULT_ALIGN
from decomposable_edge.sizing.sweep import Runs, sweep


def measure(
    net: DecomposedNet,
    sizes: Sequence[float] | None = None,
    *,
    runtime: str = "torch",
    batch: int = 1,
    threads: int | None = None,
    seconds: float = 10.0,
    align: int | Literal["auto", "measured"] = DEFAULT_ALIGN,
    input: InputSpec | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Entry:
    """Time the original network and several sizes of it on this machine's processor, interleaved.

    Args:
        net: it stays as it is.
        sizes: budgets as in ``resize_(macs=...)`` (``params=`` where MACs are not known); by default a few usual ones.
        runtime: "torch", as `extract` gives the network, in inference mode; or "onnxruntime", as it is exported.
        batch: samples that one pass takes.
        threads: by default as many as PyTorch uses.
        seconds: about how long to measure; every size runs at least 5 times.
        align: what ranks are rounded to; "measured" tries several multiples first and takes the fastest.
        input: what the network takes, where it was decomposed without an example input.
        say: told what is going on.
    """
    call = net.call if input is None else CallSignature.with_first(input)
    if call is None:
        why = net.unclear or "the network was decomposed without an example_input"
        raise InvalidArgumentError(f"input= is needed: {why}; allowed: an InputSpec")
    count = torch.get_num_threads() if threads is None else threads

    @contextmanager
    def making(plans: Mapping[str, RankPlan]) -> Iterator[Runs]:
        say(f"{runtime}: making {len(plans)} sizes")
        modules = {name: net.extract(plan) for name, plan in plans.items()}
        with runners(runtime, modules, call, batch=batch, threads=count) as runs:
            say(f"{runtime}: timing {len(runs)} sizes side by side")
            yield runs

    return sweep(net.selector, making, sizes, runtime=runtime, batch=batch, threads=count, seconds=seconds, align=align)


@contextmanager
def runners(
    runtime: str, modules: Mapping[str, nn.Module], call: CallSignature, *, batch: int, threads: int
) -> Iterator[Runs]:
    """Functions that run these modules, each with the same batch; the number of threads holds within the context.

    Each has run once: what the network cannot take, or the machine cannot hold, is an `InvalidArgumentError`.
    """
    shapes = [f"{'x'.join(map(str, spec.shape))} ({spec.dtype})" for spec in call.inputs.values()]
    what = f"batch={batch} of {' and '.join(shapes)}"
    with refusing(InvalidArgumentError, f"{what}: there is no such batch here"):
        inputs = call.example(batch)
    make, within = (_onnx_run, nullcontext) if runtime == "onnxruntime" else (_torch_run, _inference_on)
    with within(threads):
        runs = {name: make(module, call, inputs, threads) for name, module in modules.items()}
        with refusing(InvalidArgumentError, f"{what}: {runtime} cannot run the network on it"):
            for run in runs.values():
                run()
        yield runs


@contextmanager
def _inference_on(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def _torch_run(
    module: nn.Module, call: CallSignature, inputs: Mapping[str, Tensor], threads: int
) -> Callable[[], object]:
    module = module.cpu().eval()
    return lambda: call.run(module, inputs)


def _onnx_run(
    module: nn.Module, call: CallSignature, inputs: Mapping[str, Tensor], threads: int
) -> Callable[[], object]:
    model, taken = to_onnx(module, Interface(call=call), optimize=True)
    from decomposable_edge.onnx_runtime import cpu_session  # now that it is known to be there

    with refusing(DecomposableError, "onnxruntime cannot run this network"):
        session = cpu_session(model.SerializeToString(), threads, spins=False)
        feed = {name: inputs[name].numpy() for name in taken.names}
    return lambda: session.run(None, feed)
