"""Names that users write, and the tensors of a traced step that they mean.

Keras decorates scope names (`functional_1/conv_1/...`), differently for each model, so
the layers themselves are watched while the step is traced: what each call returned,
and which ops it added.
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
from tflms_sft._util.text import alike, nearest

_LOSSES = "compile_loss"
"""Scope in which Keras computes losses, each under its name."""

_NEARLY = 0.8
"""How much a name with a scope has to be like that of an operation for one to be meant."""


@dataclasses.dataclass
class LayerCall:
    """One call of a Keras layer in a trace.

    Attributes:
        layer: Name of the layer.
        kind: Its class.
        outputs: Names of the tensors it returned.
        ops: First and one past the last op it added, counted in the traced graph.
        trainable: Whether it has trainable weights.
        graph: The graph being traced.
    """

    layer: str
    kind: str
    outputs: list[str]
    ops: tuple[int, int]
    trainable: bool
    graph: Any = dataclasses.field(repr=False, default=None)


@dataclasses.dataclass
class LayerRecord:
    """All layer calls of a trace, and the inputs of functional models."""

    calls: list[LayerCall] = dataclasses.field(default_factory=list)
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    layer_of_op: dict[str, LayerCall] = dataclasses.field(default_factory=dict)

    def finish(self, traced: Any) -> None:
        """Keep what belongs to this trace, and map each op to the innermost layer call that added it.

        TensorFlow may trace a function twice, the first time to see whether it makes variables.
        """
        self.calls = [call for call in self.calls if call.graph is traced]
        names = [operation.name for operation in traced.get_operations()]
        # Inner calls end before outer ones, which may add no other operations.
        for call in sorted(reversed(self.calls), key=lambda c: c.ops[0] - c.ops[1]):
            for name in names[call.ops[0] : call.ops[1]]:
                self.layer_of_op[name] = call

    def call_of(self, op: str) -> LayerCall | None:
        """The innermost layer call that added an op, or through which autodiff went back when it did."""
        if op in self.layer_of_op:
            return self.layer_of_op[op]
        path = forward_scope_of_gradient(op)
        while path:
            if path in self._scopes:
                return self._scopes[path]
            path = path.rpartition("/")[0]
        return None

    @functools.cached_property
    def _scopes(self) -> dict[str, LayerCall | None]:
        """Calls by the names of ops and of the scopes that these lie in; `None` if there are several in one."""
        found: dict[str, LayerCall | None] = dict(self.layer_of_op)
        for name, call in self.layer_of_op.items():
            scope = name.rpartition("/")[0]
            if scope not in self.layer_of_op:
                found[scope] = call if found.setdefault(scope, call) is call else None
        return found

    def candidates(self, graph: Graph) -> dict[str, list[Tensor]]:
        """Tensors by name: layers and their numbered calls, and model inputs."""
        found: dict[str, list[list[Tensor]]] = {}
        for call in self.calls:
            tensors = [t for t in (lookup(graph, name) for name in call.outputs) if t is not None]
            if tensors:
                found.setdefault(call.layer, []).append(tensors)
        result: dict[str, list[Tensor]] = {}
        for layer, calls in found.items():
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
    """The tensor of that name, or what normalisation replaced it by."""
    if tensor_name in graph.aliases:
        return graph.aliases[tensor_name]
    name, _, index = tensor_name.partition(":")
    node = graph.nodes.get(name)
    if node is None or not (index or "0").isdigit() or int(index or 0) >= len(node.outputs):
        return None
    return node.out(int(index or 0))


@contextlib.contextmanager
def recorded_layers() -> Iterator[LayerRecord]:
    """Watch every Keras layer call while a step is traced."""
    with _WATCHING:
        yield from _watched()


_WATCHING = threading.RLock()
"""The class is changed while one thread traces; another one waits."""


def _watched() -> Iterator[LayerRecord]:
    record = LayerRecord()
    original = keras.layers.Layer.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations()) if not tf.executing_eagerly() else 0
        outputs = original(self, *args, **kwargs)
        if not tf.executing_eagerly():
            _remember(record, self, args, outputs, (before, len(graph.get_operations())))
        return outputs

    keras.layers.Layer.__call__ = watched
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
            # `model.summary()` shows the layer's name, which an input without a name of its own has not.
            for name in (symbol._keras_history.operation.name, symbol.name):
                record.inputs[name] = tensor.name


def resolve(name: str, argument: str, graph: Graph, record: LayerRecord) -> list[Tensor]:
    """The tensors that a name means: a Keras layer's output, else an op's, else a tensor.

    Raises:
        SegmentError: If nothing has that name, or several calls of a layer do.
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
    # Of the same level: whoever writes no scope means an operation that has none.
    ops = [op for op in graph.nodes if ("/" in op) == ("/" in name)] or list(graph.nodes)
    known = (list(layers), ops)
    if "/" in name and alike(name, ops, _NEARLY):
        known = (ops, list(layers))
    raise SegmentError(
        f"`{argument}` names nothing in the step: no layer, op or tensor. Received: {argument}={name!r}. "
        + nearest(name, *known)
    )


def of_all_calls(name: str, graph: Graph, record: LayerRecord) -> list[list[Tensor]]:
    """What each call of a layer gives; nothing if it is called once, or no layer has that name."""
    layers = record.candidates(graph)
    return [layers[call] for call in _numbered(name, layers)]


def _numbered(name: str, layers: Iterable[str]) -> list[str]:
    """Names of the calls of a layer that is called several times."""
    return [known for known in layers if known.rpartition("/")[0] == name and known.rpartition("/")[2].isdigit()]


def part_name(record: LayerRecord, op: str) -> str:
    """The layer or the loss that an operation is of, or that autodiff made it for; empty if it is of neither."""
    path = f"{forward_scope_of_gradient(op)}/{op.rpartition('/')[2]}".removeprefix("/") if is_autodiff_name(op) else op
    scope, *inner = path.split("/")
    if scope == _LOSSES and len(inner) > 1:
        return f"loss {inner[0]!r}"
    call = record.call_of(op)
    return "" if call is None else f"layer {call.layer!r} ({call.kind})"


def captured(concrete_fn: Any, graph: Graph) -> list[tuple[Tensor, Any]]:
    """What a step reads besides its arguments, such as handles of variables: in its graph, and what it is."""
    count = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)
    return list(zip(graph.inputs[count:], concrete_fn.captured_inputs, strict=True))


def variable_names(concrete_fn: Any, graph: Graph) -> dict[Tensor, str]:
    """Names of variables that are known by one, by their handles."""
    names = {id(variable.handle): variable.name for variable in concrete_fn.graph.variables}
    return {handle: names[id(tensor)] for handle, tensor in captured(concrete_fn, graph) if id(tensor) in names}


def display_names(graph: Graph, record: LayerRecord) -> Mapping[Tensor, str]:
    """For tensors that have one, the name to print: it can be pasted back into a `SegmentSpec`."""
    result: dict[Tensor, str] = {}
    for name, tensors in record.candidates(graph).items():
        if len(tensors) == 1:
            result.setdefault(tensors[0], name)  # The layer itself rather than the model around it.
    return result
