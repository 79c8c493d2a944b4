"""What PyTorch's exporter to ONNX need not do: it traces a program again, to take its operators apart.

That is a third of an export. Where a program holds but operators that it translates as they are, and a few that are
replaced here, node by node, that is spared; any other program is traced again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

aten: Any = torch.ops.aten
_FRESH = {  # their outputs are no views of anything else
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default, aten.linear.default),
    *(aten.add.Tensor, aten.cat.default, aten.layer_norm.default, aten._native_batch_norm_legit_no_training.default),
}
_TRANSLATED = _FRESH | {
    *(aten.relu.default, aten.relu6.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default),
    *(aten.tanh.default, aten.leaky_relu.default, aten.hardtanh.default, aten.hardswish.default),
    *(aten.mul.Tensor, aten.sub.Tensor, aten.mean.dim),
    *(aten.max_pool2d.default, aten.avg_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec),
    *(aten.flatten.using_ints, aten.pad.default, aten.slice.Tensor, aten.transpose.int, aten.permute.default),
    *(aten.dropout.default, operator.getitem),
}
_IN_PLACE = {
    aten.relu_.default: aten.relu.default,
    aten.silu_.default: aten.silu.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.add_.Tensor: aten.add.Tensor,
}


def spare_decompositions(program: ExportedProgram) -> None:
    """Let the exporter take a program as it is, where that is possible."""
    is_stateless = not program.graph_signature.buffers_to_mutate
    nodes = list(program.graph.nodes)
    if is_stateless and all(map(_lower, nodes)):
        program.run_decompositions = lambda *_, **__: program


def _lower(node: Node) -> bool:
    """Replace the operator of a node by one that is translated, under the node's name; return whether it is one now."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.target in _LOWERED and not node.kwargs:
        _LOWERED[node.target](node)
    if node.target in _IN_PLACE and _is_last_use(node):
        node.target = _IN_PLACE[node.target]
    return node.target in _TRANSLATED


def _is_last_use(node: Node) -> bool:
    """Return whether nobody but this node sees what it writes over."""
    source = node.args[0]
    assert isinstance(source, Node)
    maker = source.args[0] if source.target is operator.getitem else source
    is_fresh = isinstance(maker, Node) and maker.target in _FRESH
    dtypes = {each.meta["val"].dtype for each in node.all_input_nodes}
    return is_fresh and len(source.users) == 1 and len(dtypes) == 1


def _lower_batch_norm(node: Node) -> None:
    x, weight, bias, mean, variance, is_training, momentum, epsilon, _ = node.args
    if is_training or mean is None or variance is None:
        return
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, variance, momentum, epsilon)
        )
    value = node.meta["val"]
    made.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
    node.target, node.args = operator.getitem, (made, 0)


def _lower_pool(node: Node) -> None:
    x, size = node.args
    if list(size) == [1, 1]:  # type: ignore[arg-type]
        node.target, node.args = aten.mean.dim, (x, [-1, -2], True)


def _lower_transposed(node: Node) -> None:
    values: list[Any] = [*node.args, *_DEFAULTS[len(node.args) - 2 :]]
    x, weight, bias, stride, padding, output_padding, groups, dilation = values
    node.target, node.args = (
        aten.convolution.default,
        (x, weight, bias, stride, padding, dilation, True, output_padding, groups),
    )


_DEFAULTS = (None, [1, 1], [0, 0], [0, 0], 1, [1, 1])  # of a transposed convolution
_LOWERED: dict[Any, Callable[[Node], None]] = {
    aten.batch_norm.default: _lower_batch_norm,
    aten.adaptive_avg_pool2d.default: _lower_pool,
    aten.conv_transpose2d.input: _lower_transposed,
}
