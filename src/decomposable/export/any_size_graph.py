"""The graph in a file: a network with a chain in place of every decomposed layer, simplified around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from decomposable.export.graph import name_values
from decomposable.export.program import ExportError
from decomposable.export.quiet import quiet
from decomposable.export.recurrent import check_types, drop_unused
from decomposable.network.decomposed import DecomposedNet
from decomposable.network.file.contents import join
from decomposable.network.parts import mapped
from decomposable_edge.sizing.record import factor_names, state_name

if TYPE_CHECKING:
    import onnx
    import onnx_ir


def in_chains(net: DecomposedNet) -> nn.Module:
    """Return the network with a chain, all bases, in place of every decomposed layer."""
    return net._original.in_factors(mapped(Tensor.contiguous, net._factors))


def names_of(net: DecomposedNet) -> dict[str, str]:
    """Return the names of weights in the file, by every name that the exporter may give them.

    Buffers that the state dict has not are constants of the graph.
    """
    held, firsts = in_chains(net), dict[int, str]()
    for key, tensor in net._base.state_dict(keep_vars=True).items():
        firsts.setdefault(id(tensor), key)
    names = {
        name: state_name(firsts[id(tensor)])
        for name, tensor in held.state_dict(keep_vars=True).items()
        if id(tensor) in firsts
    }
    for layer in net.artifact().skeleton.layers:
        stages = factor_names(layer)
        names |= {join(path, f"{i}.weight"): name for path in layer.paths for i, name in enumerate(stages)}
    return names


def tidy(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """Compute all that is constant but for the weights of `names`, which get these names."""
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript import optimizer

    with quiet():
        ir = onnx_ir.from_proto(model)
        held = _as_inputs(ir, set(names))
        optimizer.fold_constants(ir, onnx_shape_inference=True)
        for each in (
            common.InlinePass(),
            common.IdentityEliminationPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),
        ):
            ir = each(ir).model
        _as_initializers(ir, held)
        result: onnx.ModelProto = onnx_ir.to_proto(ir)
    name_values(result.graph, {}, [value.name for value in model.graph.output])  # simplifying makes equal values one
    _rename(result.graph, names)
    check_types(result)
    _name_nodes(result.graph, names)
    return result


def without_weights(model: onnx.ModelProto, names: dict[str, str]) -> bytes:
    """Return the graph alone: its weights are in the file under the same names."""
    weights = set(names.values())
    bare = type(model)()
    bare.CopyFrom(model)
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name not in weights)
    content: bytes = bare.SerializeToString(deterministic=True)
    return content


def _as_inputs(ir: onnx_ir.Model, names: set[str]) -> dict[str, Any]:
    """Let weights look like inputs, whose values nobody knows; what is taken away comes back."""
    held = {}
    for name in sorted(names & set(ir.graph.initializers)):
        value = ir.graph.initializers.pop(name)
        held[name], value.const_value = value.const_value, None
        ir.graph.inputs.append(value)
    return held


def _as_initializers(ir: onnx_ir.Model, held: dict[str, Any]) -> None:
    for value in [value for value in ir.graph.inputs if value.name in held]:
        ir.graph.inputs.remove(value)
        value.const_value = held[str(value.name)]
        if value.uses():
            ir.graph.register_initializer(value)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Give the weights their names, and lay all values out as plain bytes."""
    from onnx import numpy_helper

    from decomposable_edge.onnx_model import tensor_of, type_name

    present: dict[str, Any] = {}
    made = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    for tensor in graph.initializer:
        if type_name(tensor.data_type) is None:
            raise ExportError(f"export: '{tensor.name}' is of a type that ONNX Runtime's CPU does not run")
        name = names.get(tensor.name, tensor.name)
        if name in made or (name in present and tensor.name not in names):
            raise ExportError(
                f"export: an input, output or parameter is called '{name}', as weights in the file are; "
                "allowed: another name"
            )
        present[name] = numpy_helper.to_array(tensor)
    del graph.initializer[:]
    graph.initializer.extend(tensor_of(name, array) for name, array in present.items())
    del graph.value_info[:]
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def _name_nodes(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Call the nodes of a layer as its factors, and take out the biases of zeros that the exporter puts there."""
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    weights = set(names.values())
    transposed = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Transpose" and n.input[0] in weights}
    counts: dict[str, int] = {}
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or len(node.input) < 2:
            continue
        weight = transposed.get(node.input[1], node.input[1])
        if weight not in weights:
            continue
        counts[weight] = counts.get(weight, 0) + 1
        node.name = weight if counts[weight] == 1 else f"{weight}#{counts[weight]}"
        bias = node.input[2] if len(node.input) > 2 else ""
        if bias in arrays and bias not in weights and not any(arrays[bias].raw_data):  # a tuned one may become another
            del node.input[2:]
    drop_unused(graph)
