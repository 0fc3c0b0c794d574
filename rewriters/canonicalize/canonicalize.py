"""Canonicalization: makes a traced graph uniform and small before it is analysed.

1. Inlines called functions (`graph_reader.py`), so that rules see ops. Of functions that XLA compiles, inlines those
   with grouped convolutions alone, and expands these (`expand_grouped_conv.py`). Expands fused batch normalisation
   (`expand_fused_batch_norm.py`).
2. Drops dead nodes: traces contain gradients that no op reads.
3. Bypasses `IdentityN`, the wrapper of every `custom_gradient`.
4. Bypasses `Sum` over no axes, `Reshape` to the same shape and `Transpose` to the same order. With an unknown batch
   size autodiff emits one of each behind every broadcasting op.
5. Replaces `Shape` of a tensor with a static shape by a constant, so that no shape op keeps an activation alive.
   Replaces `ShapeN`, which keeps several tensors alive, by one `Shape` each, `Size` by a product over a `Shape`, and
   `Rank` by a constant.
6. Infers shapes that TensorFlow does not know when it traces: of sums by their axes, of reshapes, of paddings, and of
   their consumers. Then repeats step 4.
7. Replaces the gradient of `Tile`, a sum over a reshape to (times, size, times, size, ...), by a sum over the tiled
   axes.
8. Connects the frames of unrolled loops directly (`connect_frames.py`).
9. For tiling, replaces gathers from a variable by gathers from its value, which have a rule. Rewrites products of
   images and matrices (`image_products.py`), folds matrices of pixels into images (`matrices_to_images.py`) and windows
   into images (`windows_to_images.py`), adds a batch axis to images without one (`add_batch_axis.py`), and rewrites
   masks of attention (`masks.py`). Lets constants, such as those of gradient functions, wait for no op.
10. Merges equal constants (`merge_constants.py`), unless the graph is compared with another trace of the step.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.canonicalize import (
    add_batch_axis,
    connect_frames,
    expand_fused_batch_norm,
    expand_grouped_conv,
    image_products,
    masks,
    matrices_to_images,
    windows_to_images,
)
from rewriters.canonicalize.merge_constants import MergeConstants
from rewriters.device.loop_lists import add_loop_facts
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Metadata, Node, Tensor, predecessors
from rewriters.ir.graph_pass import GraphPass, PassResult, record_state, run_pass
from rewriters.ir.graph_reader import from_concrete_function, inline_calls, is_call, is_xla_call
from rewriters.ir.static_values import StaticEvaluator, add_constant, constant, op_attrs
from rewriters.rules.reduction import REDUCTIONS

__all__: list[str] = []

MAX_ROUNDS = 1000
"""More rounds than any chain of ops needs, if each round finds the shape of one more."""


class CanonicalMode(enum.Enum):
    """Selection of the steps of canonicalization, as numbered at the top of this module.

    Attributes:
        EXACT: No step that may change rounding; results differ in the sign of a zero at most. For swapping.
        BATCH_ANALYSIS: Also expands grouped convolutions, so that the analysis of the batch sees their samples and
            weights. For pipelines.
        TILING: Also expands grouped convolutions and fused batch normalisation, and runs step 9. Results are equal up
            to rounding.
    """

    EXACT = "exact"
    BATCH_ANALYSIS = "batch_analysis"
    TILING = "tiling"


def read_canonical(
    concrete_fn: Any,
    mode: CanonicalMode = CanonicalMode.TILING,
    *,
    merge_constants: bool = False,
    sizes: Mapping[int, int] | None = None,
    layer_of: Callable[[str], str] | None = None,
) -> Graph:
    """Read a traced function and return its canonical graph.

    Args:
        concrete_fn: A traced function, as `get_concrete_function` returns.
        mode: Rewritings that are allowed.
        merge_constants: Whether to run step 10. Two traces of a step for different batch sizes are compared constant by
            constant: in one of them a batch size may equal another number.
        sizes: `Graph.sizes` of the result.
        layer_of: Maps the name of an op to that of its Keras layer, for the metadata of the ops.
    """
    graph = from_concrete_function(concrete_fn)
    _mark_layers(graph, layer_of)
    record_state(graph, "traced", "The graph that TensorFlow traced.")
    _step(graph, Graph.prune)
    history = graph.history
    if any(
        is_call(node) or is_xla_call(node) or expand_fused_batch_norm.is_fused(node) for node in graph.nodes.values()
    ):
        if mode is CanonicalMode.EXACT:
            graph = inline_calls(concrete_fn)
        else:
            outline = expand_fused_batch_norm.outline_fused_batch_norm if mode is CanonicalMode.TILING else None
            graph = expand_grouped_conv.expand_grouped_convolutions(concrete_fn, outline)
        graph.prune()
        _mark_layers(graph, layer_of)
        graph.history = history
        record_state(graph, "inline_calls", "Inline called functions, expand fused ops, and remove dead ops.")
    graph.sizes = sizes or {}
    graph = canonicalize_graph(graph, mode)
    if merge_constants:
        graph = run_pass(MergeConstants(), graph).graph
    add_loop_facts(graph)
    return graph


def _mark_layers(graph: Graph, layer_of: Callable[[str], str] | None) -> None:
    """Set the layers in the metadata of the ops of a graph that has just been read."""
    if layer_of is not None:
        for node in graph.nodes.values():
            node.metadata = Metadata(layer=layer_of(node.name))


def canonicalize_graph(graph: Graph, mode: CanonicalMode = CanonicalMode.TILING) -> Graph:
    """Return `graph` after steps 2 to 8, and step 9 in mode `TILING`."""
    return run_pass(Canonicalization(mode), graph).graph


@dataclasses.dataclass(frozen=True)
class Canonicalization(GraphPass[PassResult]):
    """Runs steps 2 to 9 on a copy of a graph until none of them changes it.

    Each step edits the copy in place and returns whether it changed it: the steps run several times, and a copy for
    each takes longer than the step.

    Attributes:
        mode: Selects the steps.
    """

    mode: CanonicalMode

    def call(self, graph: Graph) -> PassResult:
        """Run the steps until the graph is stable.

        Raises:
            RewriteError: If the graph still changes after `MAX_ROUNDS` rounds.
        """
        new = graph.copy()
        changed = _step(new, Graph.prune)
        changed |= _step(new, _bypass_identity_n)
        for _ in range(MAX_ROUNDS):  # A shape found in one round may show that more ops have no effect.
            again, round_changed = self._round(new)
            changed |= round_changed
            if not again:
                return PassResult(new if changed else graph, changed)
        raise RewriteError(f"Canonicalization is not stable after {MAX_ROUNDS} rounds. Please report it.")

    def _round(self, graph: Graph) -> tuple[bool, bool]:
        """Run each step once, in place.

        Returns:
            Whether another round may change more, and whether this round changed the graph.
        """
        evaluate = StaticEvaluator(graph)
        again = _step(graph, _bypass_no_ops, evaluate)  # The evaluator has not seen what is read in their place.
        changed = _step(graph, Graph.prune)
        for step in (_find_shapes_of_sums, _find_shapes_by_operands, _infer_shapes, _sum_repetitions, _connect_frames):
            again |= _step(graph, step, evaluate)
        if self.mode is CanonicalMode.TILING:
            for step in _TILING_STEPS:
                if _step(graph, step, evaluate):
                    again = True
                    _step(graph, Graph.prune)
            changed |= _step(graph, _release_constants)
        changed |= _step(graph, _split_shapes)
        changed |= _step(graph, _freeze_shapes, evaluate)
        changed |= _step(graph, Graph.prune)
        return again, changed or again


def _step(graph: Graph, step: Callable[..., Any], *arguments: Any) -> bool:
    """Run a step in place, and record the state of the graph behind it; return whether the graph changed."""
    changed = bool(step(graph, *arguments))
    if changed:
        record_state(graph, step.__name__.strip("_"), step.__doc__ or "")
    return changed


def _bypass(graph: Graph, mapping: dict[Tensor, Tensor]) -> bool:
    """Let consumers of the keys read the values, and ops that wait for a bypassed node wait for its source.

    Callers bypass no node that waits for an effect which its source does not wait for: its consumers may rely on an
    assertion through it.
    """
    graph.replace_tensors(mapping, waits=True)
    return bool(mapping)


def _bypass_identity_n(graph: Graph) -> bool:
    """Let consumers of each `IdentityN` read its operands, unless the op waits for an effect."""
    order, mapping = graph.execution_order(), dict[Tensor, Tensor]()
    effects = _effects(order)
    for node in order:
        if node.op != "IdentityN" or any(effects[node] & ~effects[source.node] for source in node.inputs):
            continue
        for index, source in enumerate(node.inputs):
            mapping[node.out(index)] = mapping.get(source, source)
    return _bypass(graph, mapping)


def _effects(order: Iterable[Node]) -> dict[Node, int]:
    """Return for each node the effects (assignments, assertions) that precede it, as a set of bits."""
    result: dict[Node, int] = {}
    number = 0
    for node in order:
        before = 0
        for other in predecessors(node):
            before |= result[other]
        if node.stateful and node.op not in ("ReadVariableOp", "Placeholder"):
            before |= 1 << number
            number += 1
        result[node] = before
    return result


def _bypass_no_ops(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Let consumers of ops that change nothing, such as a sum over no axes, read the operand."""
    order, mapping = graph.execution_order(), dict[Tensor, Tensor]()
    effects = _effects(order)
    for node in order:
        source = mapping.get(node.inputs[0], node.inputs[0]) if node.inputs else None
        if source is None or effects[node] & ~effects[source.node]:
            continue
        if _changes_nothing(node, source, evaluate):
            mapping[node.out()] = source
    return _bypass(graph, mapping)


def _connect_frames(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Connect the steps of an unrolled loop directly instead of through a tensor of all steps."""
    mapping = connect_frames.connect_frames(graph, evaluate)
    if not mapping:
        return False
    effects = _effects(graph.execution_order())
    mapping = {old: new for old, new in mapping.items() if not effects[old.node] & ~effects[new.node]}
    connect_frames.wait_for_single_frames(graph, mapping)
    return _bypass(graph, mapping)


def _changes_nothing(node: Node, source: Tensor, evaluate: StaticEvaluator) -> bool:
    if node.op == "Sum":
        return evaluate(node.inputs[1]) == ()
    if node.op == "Transpose":
        order = evaluate(node.inputs[1])
        return isinstance(order, tuple) and order == tuple(range(len(order)))
    if node.op not in ("Reshape", "BroadcastTo"):
        return False
    have, target = evaluate.shape(source), evaluate(node.inputs[1])
    if have is None or not isinstance(target, tuple) or None in have or None in target:
        return False
    same = evaluate.sizes.assume_equal
    if len(have) == len(target) and all(t == -1 or same(h, t) for h, t in zip(have, target, strict=True)):
        return node.op == "Reshape" or -1 not in target
    return False


def _release_constants(graph: Graph) -> bool:
    """Drop control edges to constants: a tile loop reads constants that are ready before it begins.

    An edge stays if a consumer of the constant would no longer wait for an effect, such as an assertion. Other waiting
    constants do not count for a consumer, because their edges may be dropped too.
    """
    waiting = [node for node in graph.nodes.values() if node.op == "Const" and node.control_inputs]
    if not waiting:
        return False
    effects, consumers = _effects(graph.execution_order()), graph.consumers()
    results = {tensor.node for tensor in graph.outputs}
    released, candidates = [], set(waiting)
    for node in waiting:
        readers = [reader for reader, _ in consumers.get(node.out(), ())]
        others = (
            [effects[before] for before in predecessors(reader) if before not in candidates] for reader in readers
        )
        remaining = functools.reduce(operator.and_, (functools.reduce(operator.or_, bits, 0) for bits in others), -1)
        if node not in results and not effects[node] & ~remaining:
            released.append(node)
    for node in released:
        node.control_inputs = []
    return bool(released)


def _gather_from_values(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Read a variable before rows of it are gathered, which copies nothing."""
    del evaluate
    gathers = [node for node in graph.nodes.values() if node.op == "ResourceGather"]
    consumers, replaced = graph.consumers() if gathers else {}, dict[Tensor, Tensor]()
    for node in gathers:
        handle, indices = node.inputs
        shape = _variable_shape([reader for reader, _ in consumers[handle]])
        if shape is None or ("batch_dims" in node.attrs and node.attrs["batch_dims"].i):
            continue
        dtype, _ = node.outputs[0]
        value = graph.add_beside(node, "ReadVariableOp", [handle], op_attrs(dtype=dtype), [(dtype, shape)])
        value.control_inputs = list(node.control_inputs)
        axis = add_constant(graph, f"{node.name}/axis", 0, tf.int32)
        attrs = op_attrs(Tparams=dtype, Tindices=indices.dtype, Taxis=tf.int32, batch_dims=0)
        rows = graph.add_beside(node, "GatherV2", [value.out(), indices, axis], attrs, node.outputs)
        replaced[node.out()] = rows.out()
    _bypass(graph, replaced)
    read = {tensor.node for tensor in replaced}
    graph.keep = [node for node in graph.keep if node not in read]
    return bool(replaced)


def _variable_shape(users: Iterable[Node]) -> Any:
    """Return the shape of a variable from ops that read it as a whole or assign to it; `None` if it is not known.

    An op that updates some rows has their indices as a third operand.
    """
    for node in users:
        value = None
        if node.op == "ReadVariableOp":
            value = node.out()
        elif len(node.inputs) == 2 and not node.outputs:
            value = node.inputs[1]
        if value is not None and value.shape and None not in value.shape:
            return value.shape
    return None


def _find_shapes_of_sums(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Set the shapes of sums whose axes TensorFlow does not know before the step runs."""
    changed = False
    for node in graph.nodes.values():
        if node.op not in REDUCTIONS:
            continue
        dtype, shape = node.outputs[0]
        dims, summed = node.inputs[0].shape, evaluate.reduction_axes(node)
        if summed is None or dims is None or (shape is not None and None not in shape[1:]):
            continue
        keep = node.attrs["keep_dims"].b
        new = tuple(1 if i in summed else dim for i, dim in enumerate(dims) if keep or i not in summed)
        changed |= new != shape
        node.outputs[0] = (dtype, new)
    return changed


def _find_shapes_by_operands(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Set the shapes of reshapes and paddings by their second operand, if at most one size is unknown."""
    changed = False
    for node in graph.nodes.values():
        if node.op not in ("Reshape", "Pad", "PadV2"):
            continue
        dtype, shape = node.outputs[0]
        target = evaluate(node.inputs[1])
        if target is None or (shape is not None and None not in shape[1:]):
            continue
        if isinstance(target, np.ndarray):
            dims = node.inputs[0].shape
            if dims is None or len(dims) != len(target):
                continue
            target = tuple(_padded_size(dim, rows) for dim, rows in zip(dims, target.tolist(), strict=True))
        if not isinstance(target, tuple):
            continue
        new = tuple(size if isinstance(size, int) and size >= 0 else None for size in target)
        if None not in new[1:]:
            node.outputs[0] = (dtype, new)
            changed = True
    return changed


def _padded_size(size: int | None, rows: list[Any]) -> int | None:
    """Return a size with rows of padding before and after, `None` if one of the numbers is unknown."""
    return None if size is None or not all(isinstance(number, int) for number in rows) else size + sum(rows)


def _infer_shapes(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Let TensorFlow infer again the shapes of ops whose operands have got a known shape."""
    del evaluate
    changed = False
    with tf.Graph().as_default():
        for node in graph.execution_order():
            if not (_has_open_shape(node) and node.inputs):
                continue
            if any(_is_open(tensor.shape) or tensor.dtype in (tf.resource, tf.variant) for tensor in node.inputs):
                continue
            merged = [_merged_shape(old, new) for (_, old), new in zip(node.outputs, _inferred(node), strict=True)]
            changed |= merged != [shape for _, shape in node.outputs]
            node.outputs = [(dtype, shape) for (dtype, _), shape in zip(node.outputs, merged, strict=True)]
    return changed


def _merged_shape(old: Any, new: Any) -> Any:
    """Return the new shape, with the first size of the old one if that was known."""
    if not old or not new or old[0] is None:
        return old if new is None else new
    return (old[0], *new[1:])


def _has_open_shape(node: Node) -> bool:
    """Return whether a size other than that of the batch is unknown. The gradient of a matrix has no batch axis."""
    if node.op == "MatMul" and node.attrs["transpose_a"].b:
        return None in (node.out().shape or (None,))
    return any(_is_open(shape) for _, shape in node.outputs)


def _is_open(shape: Any) -> bool:
    """Return whether a size beside the first is unknown."""
    return shape is None or None in shape[1:]


def _inferred(node: Node) -> list[Any]:
    """Return the shapes that TensorFlow infers, `None` where a size stays unknown. Adds an op to the default graph."""
    operands = [_stand_in(tensor) for tensor in node.inputs]
    dtypes = [dtype for dtype, _ in node.outputs]
    try:
        results = tf_internals.create_op(node.op, operands, dtypes, node.attrs, "inferred", "")
    except (ValueError, TypeError, tf.errors.OpError):
        return [None] * len(node.outputs)  # For example, it calls a function that this graph does not have.
    shapes = [None if result.shape.rank is None else tuple(result.shape) for result in results]
    return [shape if shape is not None and not _is_open(shape) else None for shape in shapes]


def _stand_in(tensor: Tensor) -> Any:
    value = constant(tensor.node)
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape) if value is None else tf.constant(value, tensor.dtype)


def _sum_repetitions(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace gradients of `Tile`, a sum over a reshape that splits every axis, by a sum over the tiled axes."""
    mapping: dict[Tensor, Tensor] = {}
    for node in list(graph.nodes.values()):
        if node.op != "Sum" or node.attrs["keep_dims"].b:
            continue
        before = node.inputs[0].node
        if before.op != "Reshape" or node.control_inputs or before.control_inputs:
            continue
        source, target = before.inputs[0], evaluate(before.inputs[1])
        shape, axes = evaluate.shape(source), evaluate.ints(node.inputs[1])
        if shape is None or not isinstance(target, tuple) or axes != tuple(range(0, 2 * len(shape), 2)):
            continue
        if len(target) != 2 * len(shape):
            continue
        times, sizes = target[::2], target[1::2]
        unchanged = [
            a == 1 and (evaluate.sizes.assume_equal(b, c) or b == -1)
            for a, b, c in zip(times, sizes, shape, strict=True)
        ]
        summed = [b == 1 and evaluate.sizes.assume_equal(a, c) for a, b, c in zip(times, sizes, shape, strict=True)]
        if all(u or s for u, s in zip(unchanged, summed, strict=True)):
            mapping[node.out()] = _sum_over(graph, node, source, tuple(i for i, u in enumerate(unchanged) if not u))
    return _bypass(graph, mapping)


def _sum_over(graph: Graph, node: Node, source: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Add a sum of `source` over axes that stay with size 1, to replace another sum."""
    assert source.shape is not None
    operands = [source, add_constant(graph, f"{node.name}/axes", axes, tf.int32)]
    attrs = op_attrs(T=source.dtype, Tidx=tf.int32, keep_dims=True)
    shape = tuple(1 if dim in axes else size for dim, size in enumerate(source.shape))
    outputs = [(source.dtype, shape)]
    return graph.new_node(
        f"{node.name}/repeated", "Sum", operands, attrs=attrs, device=node.device, outputs=outputs
    ).out()


def _split_shapes(graph: Graph) -> bool:
    """Replace all ops that read sizes by `Shape`: one per operand of `ShapeN`, and a product over it for `Size`.

    `ShapeN` would keep all of its operands alive for the sake of one. `Rank` becomes a constant; ops that wait for an
    assertion through it wait through the constant.
    """
    mapping: dict[Tensor, Tensor] = {}
    for node in list(graph.nodes.values()):
        if node.op == "ShapeN":
            for index in range(len(node.inputs)):
                mapping[node.out(index)] = _shape_of(graph, node, index)
        elif node.op == "Size" and node.inputs[0].shape is not None:
            mapping[node.out()] = _number_of_elements(graph, node)
        elif node.op == "Rank" and node.inputs[0].shape is not None:
            rank = add_constant(graph, f"{node.name}/static", len(node.inputs[0].shape), tf.int32)
            rank.node.control_inputs = list(node.control_inputs)
            mapping[node.out()] = rank
    return _bypass(graph, mapping)


def _shape_of(graph: Graph, node: Node, index: int = 0) -> Tensor:
    """Add a `Shape` of an operand of a node that reads sizes."""
    source, (dtype, _) = node.inputs[index], node.outputs[index]
    rank = None if source.shape is None else (len(source.shape),)
    shape = graph.new_node(
        f"{node.name}/shape_{index}",
        "Shape",
        [source],
        control_inputs=node.control_inputs,
        attrs={key: node.attrs[key] for key in ("T", "out_type")},
        device=node.device,
        outputs=[(dtype, rank)],
    )
    return shape.out()


def _number_of_elements(graph: Graph, node: Node) -> Tensor:
    """Add a product over the shape, to replace `Size`."""
    axes = add_constant(graph, f"{node.name}/axes", (0,), tf.int32)
    attrs = op_attrs(T=node.outputs[0][0], Tidx=tf.int32, keep_dims=False)
    operands = [_shape_of(graph, node), axes]
    return graph.new_node(
        f"{node.name}/product", "Prod", operands, attrs=attrs, device=node.device, outputs=node.outputs
    ).out()


def _freeze_shapes(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace known integer vectors by constants; ops that wait for an effect through them still wait for it."""
    readers = graph.consumers()
    mapping: dict[Tensor, Tensor] = {}
    for node in list(graph.nodes.values()):
        if node.op not in ("Shape", "BroadcastGradientArgs", "ConcatOffset"):
            continue
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            value = evaluate.ints(tensor) if readers.get(tensor) else None
            if value is not None:
                mapping[tensor] = add_constant(graph, f"{node.name}/static_{index}", value, tensor.dtype)
                mapping[tensor].node.control_inputs = list(node.control_inputs)
    graph.replace_tensors(mapping)
    return bool(mapping)


_TILING_STEPS = (
    _gather_from_values,
    image_products.rewrite_image_products,
    matrices_to_images.fold_matrices_into_images,
    windows_to_images.fold_windows_into_images,
    add_batch_axis.add_batch_axis,
    masks.rewrite_masks,
)
"""Steps that tiling needs, in the order in which they run."""
