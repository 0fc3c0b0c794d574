"""Static evaluation of shapes and small integer tensors, with symbols for unknown leading sizes.

With an unknown batch size TensorFlow computes the operands of `Sum`, `Reshape`, `Slice` or `Conv2DBackpropInput` at run
time, from the shapes of *full-size* tensors. On a tile the same ops would compute other values, so they are evaluated
here, before tiling. A value is an `int` (1 and 0 for truth values), a nested list of integers as a flat tuple, a
`SymbolicDim` for an unknown leading size, or `None` if it is unknown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.symbolic_dims import LeadingSizes, SymbolicDim

__all__: list[str] = []

MAX_ELEMENTS = 64
"""Elements of a constant up to which its value is read; larger constants are data."""

Dim = int | SymbolicDim | None
Value = Dim | tuple[Dim, ...] | np.ndarray
Handler = Callable[[Node, int, list[Any]], Value]
"""Computes the value of a result from the node, the index of the result and the operands' values."""


class StaticEvaluator:
    """Evaluates tensors on demand and remembers the results.

    Attributes:
        sizes: Unknown leading sizes, by tensor.
    """

    def __init__(self, graph: Graph, order: Iterable[Node] | None = None) -> None:
        """Prepare the evaluation of a graph; `order` is a topological order if the caller has one."""
        self._known: dict[Tensor, Value] = {}
        self.sizes = LeadingSizes(graph)
        self.sizes.find(graph.execution_order() if order is None else order, self)

    def __call__(self, tensor: Tensor) -> Value:
        """Return the value of `tensor`: a dim for a scalar, a tuple for a vector, `None` if unknown."""
        if tensor not in self._known:
            self._known[tensor] = None  # Ends recursion in an invalid, cyclic graph.
            self._known[tensor] = self._evaluate(tensor)
        return self._known[tensor]

    def given(self, values: Mapping[Tensor, Value]) -> StaticEvaluator:
        """Return an evaluator of the graph in which some tensors have these values."""
        evaluator = copy.copy(self)
        evaluator._known = dict(values)
        return evaluator

    def ints(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Return a vector of integers if all of them are known, otherwise `None`."""
        value = self(tensor)
        if isinstance(value, tuple) and all(isinstance(v, int) for v in value):
            return value  # type: ignore[return-value]
        return None

    def reduction_axes(self, reduction: Node) -> set[int] | None:
        """Return the axes of a reduction, counted from the front; `None` if they, or the rank, are unknown."""
        value, shape = self(reduction.inputs[1]), reduction.inputs[0].shape
        axes = value if isinstance(value, tuple) else (value,)
        if shape is None or not all(isinstance(axis, int) for axis in axes):
            return None
        return {int(axis) % len(shape) for axis in axes}  # type: ignore[arg-type]

    def shape(self, tensor: Tensor) -> tuple[Dim, ...] | None:
        """Return the static shape, with a `SymbolicDim` for an unknown leading size."""
        if not tensor.shape:
            return tensor.shape
        return (self.sizes.of(tensor), *tensor.shape[1:])

    def _evaluate(self, tensor: Tensor) -> Value:
        node = tensor.node
        if node.op in ("Shape", "ShapeN"):
            return self.shape(node.inputs[tensor.index])
        handler = self._handler(node)
        if handler is None:
            return None
        if node.op == "Const":
            return handler(node, tensor.index, [])
        operands = [self(t) for t in node.inputs]
        if any(v is None or (isinstance(v, np.ndarray) and handler not in _MATRIX_HANDLERS) for v in operands):
            return None
        try:
            return handler(node, tensor.index, operands)
        except (TypeError, ValueError, ZeroDivisionError, IndexError, KeyError):
            return None  # Arithmetic on a symbol, or on a matrix: unknown.

    def _handler(self, node: Node) -> Handler | None:
        """Return the handler of a node. Those of ops on symbolic sizes are methods."""
        if node.op == "BroadcastGradientArgs":
            return self._summed_axes
        return self._multiplied if node.op == "Mul" else _HANDLERS.get(node.op)

    def _multiplied(self, node: Node, index: int, operands: list[Any]) -> Value:
        """Return a product; that of a single symbol and a number is a multiple of the symbol."""
        vectors = [_vector(value) for value in operands]
        numbers = [vector[0] for vector in vectors if len(vector) == 1]
        symbols = [number for number in numbers if isinstance(number, SymbolicDim)]
        factors = [number for number in numbers if isinstance(number, int) and number > 0]
        if len(symbols) != 1 or len(factors) != 1:
            return _HANDLERS["Mul"](node, index, operands)
        multiple = self.sizes.multiple(symbols[0], factors[0])
        return (multiple,) if any(isinstance(value, tuple) for value in operands) else multiple

    def _summed_axes(self, _node: Node, index: int, operands: list[Any]) -> Value:
        return _summed_axes(operands[index], operands[1 - index], self.sizes.assume_equal)


def constant(node: Node) -> np.ndarray | None:
    """Return the value of a `Const`, or `None` for another op."""
    return tf.make_ndarray(node.attrs["value"].tensor) if node.op == "Const" else None


def is_inexact(dtype: tf.DType) -> bool:
    """Return whether arithmetic of a type rounds: real and complex types."""
    return bool(dtype.is_floating or dtype.is_complex)


def op_attrs(**values: Any) -> dict[str, Any]:
    """Return Python values as attributes of an op."""
    return {name: tf_internals.attr_value(value) for name, value in values.items()}


def add_constant(graph: Graph, name: str, value: Any, dtype: tf.DType) -> Tensor:
    """Add a constant to a graph."""
    array = np.array(value, dtype.as_numpy_dtype)
    attrs = op_attrs(dtype=dtype) | {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(array))}
    return graph.new_node(name, "Const", attrs=attrs, outputs=[(dtype, array.shape)]).out()


def _const(node: Node, _index: int, _operands: list[Any]) -> Value:
    dtype, shape = node.outputs[0]
    if not dtype.is_integer or shape is None or len(shape) > 2 or math.prod(d or 0 for d in shape) > MAX_ELEMENTS:
        return None
    array = constant(node)
    assert array is not None
    return _from_array(array)


def _from_array(array: np.ndarray) -> Value:
    """Return an array as a value; a matrix (the operand of `Pad`) stays an array."""
    if array.ndim > 1:
        return array
    return tuple(v if isinstance(v, SymbolicDim) else int(v) for v in array) if array.ndim else int(array)


def _vector(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _product(node: Node, _index: int, operands: list[Any]) -> Value:
    if operands[1] == () or node.attrs["keep_dims"].b:
        return operands[0] if operands[1] == () else None
    values = [v for v in _vector(operands[0]) if v != 1]
    if len(values) == 1:
        return values[0]
    return int(np.prod([_as_int(v) for v in values], dtype=np.int64)) if values else 1


def _as_int(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError("symbolic")
    return value


def _difference(a: Any, b: Any) -> int:
    return 0 if isinstance(a, SymbolicDim) and a == b else _as_int(a) - _as_int(b)


def _of_ints(function: Callable[[int, int], int]) -> Handler:
    return _binary(lambda a, b: function(_as_int(a), _as_int(b)))


def _binary(function: Callable[[Any, Any], int]) -> Handler:
    def handler(_node: Node, _index: int, operands: list[Any]) -> Value:
        a, b = operands
        if not isinstance(a, tuple) and not isinstance(b, tuple):
            return function(a, b)
        size = max(len(_vector(a)), len(_vector(b)))
        a, b = (v if len(v) == size else v * size for v in (_vector(a), _vector(b)))
        return tuple(function(x, y) for x, y in zip(a, b, strict=True))

    return handler


def _pack(node: Node, _index: int, operands: list[Any]) -> Value:
    if not any(isinstance(v, tuple) for v in operands):
        return tuple(operands)
    rows = np.array(operands, object)
    if rows.ndim != 2:
        return None
    return rows if node.attrs["axis"].i in (0, -2) else rows.transpose()


def _transpose(_node: Node, _index: int, operands: list[Any]) -> Value:
    value, order = operands
    return _from_array(value.transpose(order)) if isinstance(value, np.ndarray) else value


def _stitch(_node: Node, _index: int, operands: list[Any]) -> Value:
    """Place numbers at their indices; if an index occurs twice, its last number counts."""
    half = len(operands) // 2
    places = [place for part in operands[:half] for place in _vector(part)]
    values = [value for part in operands[half:] for value in _vector(part)]
    value_at = dict(zip(places, values, strict=True))
    return tuple(value_at[place] for place in range(len(value_at)))


def _concat(_node: Node, _index: int, operands: list[Any]) -> Value:
    if any(isinstance(part, np.ndarray) for part in operands):  # The gradient of `Slice` joins columns of paddings.
        return np.concatenate(operands[:-1], _as_int(operands[-1]))
    return tuple(v for part in operands[:-1] for v in _vector(part))


def _slice(_node: Node, _index: int, operands: list[Any]) -> Value:
    if isinstance(operands[0], np.ndarray):
        return _from_array(
            operands[0][tuple(slice(b, None if s == -1 else b + s) for b, s in zip(*operands[1:], strict=True))]
        )
    value, (begin,), (size,) = _vector(operands[0]), operands[1], operands[2]
    return value[begin:] if size == -1 else value[begin : begin + size]


def _strided_slice(node: Node, _index: int, operands: list[Any]) -> Value:
    value, begin, end, stride = (_vector(v) for v in operands)
    masks = {key: node.attrs[key].i for key in ("begin_mask", "end_mask", "shrink_axis_mask", "new_axis_mask")}
    if len(begin) != 1 or masks["new_axis_mask"] or node.attrs["ellipsis_mask"].i:
        return None
    if masks["shrink_axis_mask"]:
        return value[begin[0]]
    first = None if masks["begin_mask"] else begin[0]
    last = None if masks["end_mask"] else end[0]
    return value[first : last : stride[0]]


def _summed_axes(mine: Any, other: Any, same: Callable[[Any, Any], bool]) -> Value:
    """Return the axes over which the gradient of an operand of shape `mine` is summed after broadcasting."""
    rank = max(len(mine), len(other))
    added = rank - len(mine)
    mine, other = ((1,) * (rank - len(v)) + v for v in (mine, other))
    axes = []
    for axis, (a, b) in enumerate(zip(mine, other, strict=True)):
        if a is None or b is None:
            return None
        if a == 1 and (b != 1 or axis < added):
            axes.append(axis)  # An unknown size against 1 needs a sum for every value of it.
        elif a != 1 and b != 1 and not same(a, b):
            return None  # One of the two may turn out to be 1.
    return tuple(axes)


def _concat_offset(_node: Node, index: int, operands: list[Any]) -> Value:
    axis, shapes = _as_int(operands[0]), operands[1:]
    axis %= len(shapes[0])
    offset = sum(_as_int(shape[axis]) for shape in shapes[:index])
    return tuple(offset if a == axis else 0 for a in range(len(shapes[0])))


def _range(_node: Node, _index: int, operands: list[Any]) -> Value:
    return tuple(range(*(_as_int(v) for v in operands)))


def _fill(_node: Node, _index: int, operands: list[Any]) -> Value:
    (count,) = operands[0]
    return (operands[1],) * _as_int(count)


def _reshape(_node: Node, _index: int, operands: list[Any]) -> Value:
    if isinstance(operands[0], np.ndarray):
        return _from_array(operands[0].reshape(_vector(operands[1])))
    value, target = _vector(operands[0]), operands[1]
    if target == ():
        return value[0]
    return value if len(_vector(target)) == 1 else np.array(value, object).reshape(target)


def _gather(node: Node, _index: int, operands: list[Any]) -> Value:
    values, indices, axis = operands
    if axis != 0 or node.attrs["batch_dims"].i:
        return None
    return tuple(values[i] for i in indices) if isinstance(indices, tuple) else values[indices]


def _first(_node: Node, _index: int, operands: list[Any]) -> Value:
    return operands[0]


_MATRIX_HANDLERS = frozenset((_slice, _reshape, _first, _transpose, _concat))
"""Handlers that take a matrix; for the others the result is unknown."""

_HANDLERS: dict[str, Handler] = {
    "Const": _const,
    "Identity": _first,
    "Cast": lambda node, _i, v: v[0] if node.outputs[0][0].is_integer else None,
    "Prod": _product,
    "Add": _of_ints(lambda a, b: a + b),
    "AddV2": _of_ints(lambda a, b: a + b),
    "Sub": _binary(_difference),
    "Neg": lambda node, index, v: _HANDLERS["Mul"](node, index, [v[0], -1]),
    "Mul": _of_ints(lambda a, b: a * b),
    "FloorDiv": _of_ints(lambda a, b: a // b),
    "FloorMod": _of_ints(lambda a, b: a % b),
    "Equal": _of_ints(lambda a, b: int(a == b)),
    "NotEqual": _of_ints(lambda a, b: int(a != b)),
    "Less": _of_ints(lambda a, b: int(a < b)),
    "LessEqual": _of_ints(lambda a, b: int(a <= b)),
    "Greater": _of_ints(lambda a, b: int(a > b)),
    "GreaterEqual": _of_ints(lambda a, b: int(a >= b)),
    "LogicalAnd": _of_ints(lambda a, b: int(a and b)),
    "LogicalOr": _of_ints(lambda a, b: int(a or b)),
    "LogicalNot": lambda _node, _i, v: int(not _as_int(v[0])),
    "Maximum": _of_ints(max),
    "Minimum": _of_ints(min),
    "Pack": _pack,
    "Unpack": lambda node, index, v: v[0][index] if isinstance(v[0], tuple) else None,
    "ConcatV2": _concat,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "ConcatOffset": _concat_offset,
    "Range": _range,
    "Fill": _fill,
    "Reshape": _reshape,
    "GatherV2": _gather,
    "Transpose": _transpose,
    "DynamicStitch": _stitch,
    "InvertPermutation": lambda _node, _i, v: tuple(int(p) for p in np.argsort([_as_int(p) for p in v[0]])),
}
