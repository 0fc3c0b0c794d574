"""Maps the layer names that users write to tensors of a traced step, and back.

Keras decorates scope names (`functional_1/conv_1/...`) differently for each model. The calls of layers are therefore
recorded while the step is traced: the tensors that each call returned and the ops that it added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from rewriters.analysis.autodiff_roles import forward_scope_of_gradient, is_autodiff_name
from rewriters.errors import SegmentError
from rewriters.ir.graph import Graph, Tensor
from tflms_sft._util.keras_internals import origin_of
from tflms_sft._util.text import alike, nearest

_LOSS_SCOPE = "compile_loss"
"""Name scope in which Keras computes losses, each under its name."""

_MIN_OP_SIMILARITY = 0.8
"""Minimum similarity, from 0 to 1, of a name with a scope to that of an op, to be suggested as a misspelt op."""


@dataclasses.dataclass
class LayerCall:
    """One call of a Keras layer in a trace.

    Attributes:
        layer: Name of the layer.
        kind: Its class.
        outputs: Names of the tensors that it returned.
        ops: Index of its first op in the traced graph, and one past its last.
        trainable: Whether the layer has trainable weights.
        graph: The traced graph.
    """

    layer: str
    kind: str
    outputs: list[str]
    ops: tuple[int, int]
    trainable: bool
    graph: Any = dataclasses.field(repr=False, default=None)


@dataclasses.dataclass
class LayerRecord:
    """The layer calls of a trace, and the inputs of functional models.

    Attributes:
        calls: Calls in the order in which they ended.
        inputs: Name of the tensor passed for each named input of a functional model.
        layer_of_op: Innermost call that added each op, by the name of the op.
    """

    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    layer_of_op: dict[str, LayerCall] = dataclasses.field(default_factory=dict)

    def finish(self, traced: Any) -> None:
        """Discard calls of other traces, and map each op to the innermost layer call that added it.

        TensorFlow may trace a function twice, the first time to detect the creation of variables.
        """
        self.calls = [call for call in self.calls if call.graph is traced]
        names = [operation.name for operation in traced.get_operations()]
        # Inner calls end before outer ones, whose ranges may be equal.
        for call in sorted(reversed(self.calls), key=lambda c: c.ops[0] - c.ops[1]):
            for name in names[call.ops[0] : call.ops[1]]:
                self.layer_of_op[name] = call

    def call_of(self, op: str) -> LayerCall | None:
        """Return the innermost layer call that added an op or its forward op; `None` if there is none."""
        if op in self.layer_of_op:
            return self.layer_of_op[op]
        path = forward_scope_of_gradient(op)
        while path:
            if path in self._scopes:
                return self._scopes[path]
            path = path.rpartition("/")[0]
        return None

    def layer_of(self, op: str) -> str:
        """Return the layer that an op, its forward op, or a scope around it belongs to; empty if there is none."""
        call, scope = self.call_of(op), op
        while call is None and scope and not is_autodiff_name(op):  # Inlining puts ops of a call below its name.
            scope = scope.rpartition("/")[0]
            call = self.layer_of_op.get(scope)
        return "" if call is None else call.layer

    @functools.cached_property
    def _scopes(self) -> dict[str, LayerCall | None]:
        """Calls by op and by enclosing name scope; `None` for a scope of several calls."""
        calls: dict[str, LayerCall | None] = dict(self.layer_of_op)
        for name, call in self.layer_of_op.items():
            scope = name.rpartition("/")[0]
            if scope not in self.layer_of_op:
                calls[scope] = call if calls.setdefault(scope, call) is call else None
        return calls

    def candidates(self, graph: Graph) -> dict[str, list[Tensor]]:
        """Return tensors by name: outputs of layers, numbered if a layer is called several times, and model inputs."""
        outputs: dict[str, list[list[Tensor]]] = {}
        for call in self.calls:
            tensors = [t for t in (lookup(graph, name) for name in call.outputs) if t is not None]
            if tensors:
                outputs.setdefault(call.layer, []).append(tensors)
        result: dict[str, list[Tensor]] = {}
        for layer, calls in outputs.items():
            if len(calls) == 1:
                result[layer] = calls[0]
            else:
                result.update({f"{layer}/{number}": tensors for number, tensors in enumerate(calls, 1)})
        for name, tensor_name in self.inputs.items():
            tensor = lookup(graph, tensor_name)
            if tensor is not None:
                result.setdefault(name, [tensor])
        return result


def lookup(graph: Graph, tensor_name: str) -> Tensor | None:
    """Return the tensor of that name, or its replacement by canonicalization; `None` if there is none."""
    if tensor_name in graph.aliases:
        return graph.aliases[tensor_name]
    name, _, index = tensor_name.partition(":")
    node = graph.nodes.get(name)
    if node is None or not (index or "0").isdigit() or int(index or 0) >= len(node.outputs):
        return None
    return node.out(int(index or 0))


_LOCK = threading.RLock()
"""Held while `Layer.__call__` is replaced, so that one thread records at a time."""


@contextlib.contextmanager
def recorded_layers() -> Iterator[LayerRecord]:
    """Record every call of a Keras layer while a step is traced."""
    record = LayerRecord()

    def recorded_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations()) if not tf.executing_eagerly() else 0
        outputs = original(self, *args, **kwargs)
        if not tf.executing_eagerly():
            _remember(record, self, args, outputs, (before, len(graph.get_operations())))
        return outputs

    with _LOCK:
        original = keras.layers.Layer.__call__
        keras.layers.Layer.__call__ = recorded_call
        try:
            yield record
        finally:
            keras.layers.Layer.__call__ = original


def _remember(record: LayerRecord, layer: Any, args: Any, outputs: Any, ops: tuple[int, int]) -> None:
    names = [t.name for t in tf.nest.flatten(outputs) if tf.is_tensor(t) and hasattr(t, "op")]
    graph = tf.compat.v1.get_default_graph()
    trainable = bool(layer.trainable_weights)
    record.calls.append(LayerCall(layer.name, type(layer).__name__, names, ops, trainable, graph))
    if isinstance(layer, keras.Model) and getattr(layer, "inputs", None) and args:
        given = [t for t in tf.nest.flatten(args[0]) if tf.is_tensor(t) and hasattr(t, "op")]
        for symbol, tensor in zip(layer.inputs, given, strict=False):
            # An unnamed input differs from the name of its layer, which `model.summary()` prints.
            for name in (origin_of(symbol)[0].name, symbol.name):
                record.inputs[name] = tensor.name


def resolve(name: str, argument: str, graph: Graph, record: LayerRecord) -> list[Tensor]:
    """Return the tensors that the name in an argument denotes: outputs of a Keras layer, else of an op, else a tensor.

    Raises:
        SegmentError: If nothing has that name, or a layer that is called several times.
    """
    layers = record.candidates(graph)
    if name in layers:
        return layers[name]
    calls = _numbered(name, layers)
    if calls:
        raise SegmentError(
            f"`{argument}` is ambiguous: layer {name!r} is called {len(calls)} times. Received: {argument}={name!r}. "
            f"Name one call: {', '.join(repr(call) for call in calls)}."
        )
    tensor = lookup(graph, name)
    if tensor is not None:
        return [tensor]
    # A name without a scope is compared with ops without one.
    ops = [op for op in graph.nodes if ("/" in op) == ("/" in name)] or list(graph.nodes)
    suggestions = (list(layers), ops)
    if "/" in name and alike(name, ops, _MIN_OP_SIMILARITY):
        suggestions = (ops, list(layers))
    raise SegmentError(
        f"`{argument}` names nothing in the step: no layer, op or tensor. Received: {argument}={name!r}. "
        + nearest(name, *suggestions)
    )


def of_all_calls(name: str, graph: Graph, record: LayerRecord) -> list[list[Tensor]]:
    """Return the outputs of each call of a layer; empty if it is called once, or no layer has that name."""
    layers = record.candidates(graph)
    return [layers[call] for call in _numbered(name, layers)]


def _numbered(name: str, layers: Iterable[str]) -> list[str]:
    """Return the names of the calls of a layer that is called several times."""
    return [call for call in layers if call.rpartition("/")[0] == name and call.rpartition("/")[2].isdigit()]


def part_name(record: LayerRecord, op: str) -> str:
    """Return the layer or the loss that an op, or the forward op of a gradient op, belongs to; empty if none."""
    path = f"{forward_scope_of_gradient(op)}/{op.rpartition('/')[2]}".removeprefix("/") if is_autodiff_name(op) else op
    scope, *inner = path.split("/")
    if scope == _LOSS_SCOPE and len(inner) > 1:
        return f"loss {inner[0]!r}"
    call = record.call_of(op)
    return "" if call is None else f"layer {call.layer!r} ({call.kind})"


def captured(concrete_fn: Any, graph: Graph) -> list[tuple[Tensor, Any]]:
    """Return (tensor in the graph, captured value) of the inputs that are not arguments, such as variable handles."""
    count = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)
    return list(zip(graph.inputs[count:], concrete_fn.captured_inputs, strict=True))


def variable_names(concrete_fn: Any, graph: Graph) -> dict[Tensor, str]:
    """Return the names of variables by their handles."""
    names = {id(variable.handle): variable.name for variable in concrete_fn.graph.variables}
    return {handle: names[id(tensor)] for handle, tensor in captured(concrete_fn, graph) if id(tensor) in names}


def display_names(graph: Graph, record: LayerRecord) -> Mapping[Tensor, str]:
    """Return the layer names of tensors to print; each is valid in a `SegmentSpec`."""
    result: dict[Tensor, str] = {}
    for name, tensors in record.candidates(graph).items():
        if len(tensors) == 1:
            result.setdefault(tensors[0], name)  # Prefers the layer to the model around it.
    return result
