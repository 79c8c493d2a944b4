"""A network as a function of no arguments that runs it once: in PyTorch or in ONNX Runtime, on so many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.export.graph import to_onnx
from decomposable.export.interface import Interface
from decomposable.export.quiet import reason
from decomposable.network.calls import Call

Runs = dict[str, Callable[[], object]]


@contextmanager
def runners(runtime: str, modules: Mapping[str, nn.Module], call: Call, *, batch: int, threads: int) -> Iterator[Runs]:
    """Functions that run these modules, each with the same batch; the number of threads holds within the context.

    Each has run once: what the network cannot take, or the machine cannot hold, is an `InvalidArgumentError`.
    """
    shapes = [f"{'x'.join(map(str, spec.shape))} ({spec.dtype})" for spec in call.inputs.values()]
    what = f"batch={batch} of {' and '.join(shapes)}"
    with _refusing(f"{what}: there is no such batch here"):
        inputs = call.example(batch)
    if runtime == "onnxruntime":
        runs = {name: _onnx_run(module, call, inputs, threads) for name, module in modules.items()}
        _try_once(runs, f"{what}: onnxruntime cannot run the network on it")
        yield runs
        return
    with _torch_threads(threads), torch.inference_mode():
        runs = {name: _torch_run(module, call, inputs) for name, module in modules.items()}
        _try_once(runs, f"{what}: torch cannot run the network on it")
        yield runs


def _try_once(runs: Runs, text: str) -> None:
    with _refusing(text):
        for run in runs.values():
            run()


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Any failure in one line: those of PyTorch and of ONNX Runtime are of many types, and pages long."""
    try:
        yield
    except Exception as error:
        raise InvalidArgumentError(f"{text} ({reason(error)})") from error


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch_run(module: nn.Module, call: Call, inputs: Mapping[str, Tensor]) -> Callable[[], object]:
    module = module.cpu().eval()
    return lambda: call.run(module, inputs)


def _onnx_run(module: nn.Module, call: Call, inputs: Mapping[str, Tensor], threads: int) -> Callable[[], object]:
    model, taken = to_onnx(module, Interface(call=call), optimize=True)
    from decomposable.edge.onnx_runtime import cpu_session  # now that it is known to be there

    try:
        session = cpu_session(model.SerializeToString(), threads, spins=False)
        feed = {name: inputs[name].numpy() for name in taken.names}
    except Exception as error:  # of types of its own
        raise DecomposableError(f"onnxruntime cannot run this network ({reason(error)})") from error
    return lambda: session.run(None, feed)
