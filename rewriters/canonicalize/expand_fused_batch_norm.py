"""Expands fused batch normalisation into elementary ops.

`FusedBatchNormV3` and its gradient reduce over all images between two passes over them, in one kernel. Each becomes a
call of a function of elementary ops, which is inlined afterwards. The reductions are then barriers, as those of Keras's
own normalisation. Formulas: S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep
Network Training by Reducing Internal Covariate Shift", 2015, section 3.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

__all__: list[str] = []

_FORWARD = "FusedBatchNormV3"
_BACKWARD = "FusedBatchNormGradV3"
OPS = (_FORWARD, _BACKWARD)


def is_fused(node: Any) -> bool:
    """Return whether a node (or node definition) is a fused batch normalisation or its gradient."""
    return node.op in OPS


def outline_fused_batch_norm(graph_def: Any) -> bool:
    """Turn fused normalisations into calls, in place; return whether there were any.

    Does nothing if a gradient in training mode reads reserved outputs (mean and variance of the batch) of another op,
    or if another op reads them: kernels store other values there.
    """
    nodes = {node.name: node for node in graph_def.node}
    gradients = [node for node in graph_def.node if node.op == _BACKWARD and node.attr["is_training"].b]
    if any(_forward_of(node, nodes) is None for node in gradients) or _has_other_readers(graph_def, nodes):
        return False
    changed = False
    for node in graph_def.node:
        if is_fused(node):
            function = _forward(node.attr) if node.op == _FORWARD else _backward(node.attr)
            _become_call(graph_def, node, function)
            changed = True
    return changed


def _forward_of(node: Any, nodes: Mapping[str, Any]) -> str | None:
    """Return the name of the normalisation whose outputs 3 to 5 are the operands 3 to 5 of a gradient."""
    names = [name.partition(":") for name in node.input[3:6]]
    sources = {name for name, _, _ in names}
    if len(sources) > 1 or [index for _, _, index in names] != ["3", "4", "5"]:
        return None
    (source,) = sources
    return source if source in nodes and nodes[source].op == _FORWARD else None


def _has_other_readers(graph_def: Any, nodes: Mapping[str, Any]) -> bool:
    """Return whether an op beside the gradient reads outputs 3 to 5, such as a branch that contains the gradient."""
    shape_readers = ("ZerosLike", "Shape", "ShapeN", "OnesLike")  # Emitted by gradient tapes.
    for node in (node for node in graph_def.node if node.op not in (_BACKWARD, *shape_readers)):
        for source, _, index in (name.partition(":") for name in node.input):
            if index in ("3", "4", "5") and source in nodes and nodes[source].op == _FORWARD:
                return True
    return False


def _become_call(graph_def: Any, node: Any, function: Any) -> None:
    concrete_fn = function.get_concrete_function()
    graph_def.library.function.append(concrete_fn.function_def)
    waits = [name for name in node.input if name.startswith("^")]
    data = [name for name in node.input if not name.startswith("^")][: len(concrete_fn.inputs)]
    node.op = "PartitionedCall"
    del node.input[:]
    node.input.extend(data + waits)
    node.attr.clear()
    node.attr["f"].func.name = concrete_fn.function_def.signature.name
    node.attr["Tin"].list.type.extend(t.dtype.as_datatype_enum for t in concrete_fn.inputs)
    node.attr["Tout"].list.type.extend(t.dtype.as_datatype_enum for t in concrete_fn.outputs)


class _ImageFormat:
    """Format of the images, from the attributes of a fused op.

    Attributes:
        dtype: Type of the images.
        sums: Type of statistics.
        rank: Rank of the images.
        axes: All axes but the channels.
        epsilon: Number that is added to the variance.
        training: Whether statistics are those of the batch.
        factor: Weight of the batch in moving averages.
    """

    def __init__(self, attr: Any) -> None:
        self.dtype = tf.as_dtype(attr["T"].type)
        self.sums = tf.as_dtype(attr["U"].type)
        layout = attr["data_format"].s.decode()
        self.rank = len(layout)
        self.axes = [dim for dim, letter in enumerate(layout) if letter != "C"]
        self.epsilon = attr["epsilon"].f
        self.training = attr["is_training"].b
        self.factor = attr["exponential_avg_factor"].f if "exponential_avg_factor" in attr else 1.0

    def over_channels(self, vector: Any) -> Any:
        """Reshape a vector over channels, so that it broadcasts against images."""
        if self.rank - 1 not in self.axes:
            return vector
        return tf.reshape(vector, [1 if dim in self.axes else -1 for dim in range(self.rank)])

    def moments(self, x: Any) -> tuple[Any, Any]:
        """Return the mean and the biased variance, shape (channels,)."""
        mean = tf.reduce_mean(x, self.axes, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(x, mean), self.axes, keepdims=True)
        return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])

    def number(self, x: Any) -> Any:
        """Return the number of pixels of all images."""
        shape = tf.shape(x)
        return tf.cast(functools.reduce(operator.mul, [shape[axis] for axis in self.axes]), self.sums)

    def averaged(self, new: Any, old: Any) -> Any:
        """Return the moving average, or the new value if the op keeps none."""
        return new if self.factor == 1.0 else (1.0 - self.factor) * old + self.factor * new

    def spec(self) -> tf.TensorSpec:
        """Return the spec of images."""
        return tf.TensorSpec([None] * self.rank, self.dtype)

    def vector(self) -> tf.TensorSpec:
        """Return the spec of a vector over channels."""
        return tf.TensorSpec([None], self.sums)


def _forward(attr: Any) -> Any:
    """Return a function of images, scale, offset, mean and variance with the six results of the fused op."""
    images = _ImageFormat(attr)

    def run(x: Any, scale: Any, offset: Any, given_mean: Any, given_variance: Any) -> Any:
        x = tf.cast(x, images.sums)
        mean, variance = statistics = given_mean, given_variance
        if images.training:
            mean, variance = images.moments(x)
            number = images.number(x)
            batch_statistics = mean, variance * (number / tf.maximum(number - 1.0, 1.0))
            statistics = tuple(images.averaged(new, old) for new, old in zip(batch_statistics, statistics, strict=True))
        scaled = tf.math.rsqrt(variance + images.epsilon) * scale
        y = (x - images.over_channels(mean)) * images.over_channels(scaled) + images.over_channels(offset)
        return tf.cast(y, images.dtype), *statistics, mean, variance, tf.zeros([0], images.sums)

    return tf.function(run, input_signature=[images.spec(), *[images.vector()] * 4], autograph=False)


def _backward(attr: Any) -> Any:
    """Return a function of gradient, images, scale, and the mean and variance that `_forward` reserved."""
    images = _ImageFormat(attr)

    def run(dy: Any, x: Any, scale: Any, mean: Any, variance: Any) -> Any:
        dy, x = tf.cast(dy, images.sums), tf.cast(x, images.sums)
        deviation = images.over_channels(tf.math.rsqrt(variance + images.epsilon))
        normal = (x - images.over_channels(mean)) * deviation
        d_offset = tf.reduce_sum(dy, images.axes)
        d_scale = tf.reduce_sum(dy * normal, images.axes)
        dx = dy
        if images.training:
            number = images.number(x)
            dx = dy - images.over_channels(d_offset / number) - normal * images.over_channels(d_scale / number)
        dx = dx * (deviation * images.over_channels(scale))
        return tf.cast(dx, images.dtype), d_scale, d_offset, *[tf.zeros([0], images.sums)] * 2

    specs = [*[images.spec()] * 2, *[images.vector()] * 3]
    return tf.function(run, input_signature=specs, autograph=False)
