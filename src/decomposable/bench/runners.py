"""A network as a function of no arguments that runs it once: in PyTorch or in ONNX Runtime, on so many threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from decomposable.errors import DecomposableError
from decomposable.parts import InputSpec

Runs = dict[str, Callable[[], object]]


@contextmanager
def runners(
    runtime: str, modules: Mapping[str, nn.Module], input: InputSpec, *, batch: int, threads: int
) -> Iterator[Runs]:
    """Functions that run these modules, each with the same batch; the number of threads holds within the context."""
    x = input.example(batch)
    if runtime == "onnxruntime":
        yield {name: _onnx_run(module, input, x, threads) for name, module in modules.items()}
        return
    with _torch_threads(threads), torch.inference_mode():
        yield {name: _torch_run(module, x) for name, module in modules.items()}


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch_run(module: nn.Module, x: Tensor) -> Callable[[], object]:
    module = module.cpu().eval()
    return lambda: module(x)


def _onnx_run(module: nn.Module, input: InputSpec, x: Tensor, threads: int) -> Callable[[], object]:
    from decomposable.export.graph import to_onnx  # brings the optional packages, or says which one is missing
    from decomposable.export.quiet import reason

    model = to_onnx(module, input, optimize=True)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # After a run, threads wait for the next one at full speed for a while: they would slow the other networks.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: x.numpy()}
        session.run(None, feed)
    except Exception as error:  # of types of its own
        raise DecomposableError(f"onnxruntime cannot run this network ({reason(error)})") from error
    return lambda: session.run(None, feed)
