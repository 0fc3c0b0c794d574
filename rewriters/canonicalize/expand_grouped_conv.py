"""Expands grouped convolutions into ops that have CPU kernels.

TensorFlow's own CPU kernels have no gradients of grouped convolutions, so Keras lets XLA compile each of them, on any
device. XLA's CPU code for them is 5 to 100 times slower than the ops of this module (`docs/develop/decisions.md`). No
model covers its memory, and a call cannot be tiled. This module inlines the call. On a CPU it then replaces a
convolution with one input channel per group by a depthwise convolution, and any other by one convolution per group.
On a GPU the grouped convolution stays: cuDNN supports groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.graph_reader import inline_calls
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import add_constant, op_attrs

__all__: list[str] = []

_FORWARD = ops_with(Trait.CONVOLUTION)
_TO_INPUT = ops_with(Trait.CONV_INPUT_GRADIENT)
_TO_FILTER = ops_with(Trait.CONV_FILTER_GRADIENT)
_CONVOLUTIONS = _FORWARD | _TO_INPUT | _TO_FILTER
_WRAPPERS = ops_with(Trait.CONV_WRAPPER)


def expand_grouped_convolutions(concrete_fn: Any, as_calls: Callable[[Any], bool] | None) -> Graph:
    """Return the graph of a function without calls, except calls of convolutions for which the device has no kernels.

    `as_calls` as for `inline_calls`.
    """
    skipped: set[str] = set()
    inlined: set[str] = set()

    def may_inline(call: str, function_def: Any) -> bool:
        possible = call not in skipped and _is_only_convolution(function_def)
        if possible:
            inlined.add(call)
        return possible

    while True:
        inlined.clear()
        graph = inline_calls(concrete_fn, may_inline, as_calls)
        remaining = _replace_grouped(graph)
        failed = {call for call in inlined if any(name.startswith(f"{call}/") for name in remaining)}
        if not failed:
            return graph
        skipped |= failed


def _is_only_convolution(function_def: Any) -> bool:
    """Return whether a function is one convolution or its gradients, and its body may replace the call.

    There are no CPU kernels for channels first and for dilations other than those written as `SpaceToBatchND`. Kernels
    for half precision add up a filter's gradient in half precision. All of these stay compiled by XLA, on any device.
    """
    nodes = [node for node in function_def.node_def if node.op in _CONVOLUTIONS]
    return bool(nodes) and all(
        node.op in _WRAPPERS or (node.op in _CONVOLUTIONS and _is_plain(node.attr)) for node in function_def.node_def
    )


def _is_plain(attrs: Any) -> bool:
    dilations = attrs["dilations"].list.i
    single = tf.as_dtype(attrs["T"].type).size > tf.float16.size
    return single and attrs["data_format"].s.endswith(b"C") and all(dilation == 1 for dilation in dilations)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Channels of one grouped convolution.

    Attributes:
        image: Channels of the input.
        filter: Shape of the filter: taps, input channels per group, output channels.
    """

    image: int
    filter: tuple[int, ...]

    @property
    def number(self) -> int:
        """Number of groups."""
        return self.image // self.filter[-2]

    @property
    def depthwise(self) -> tuple[int, ...]:
        """Shape of the filter in the layout of a depthwise convolution: taps, channels, multiplier."""
        return (*self.filter[:-2], self.image, self.filter[-1] // self.image)


def _groups(node: Node) -> _Groups | None:
    """Return the groups of a convolution; `None` if sizes are unknown."""
    image = node.out().shape if node.op in _TO_INPUT else node.inputs[0].shape
    taps = node.out().shape if node.op in _TO_FILTER else node.inputs[1].shape
    if not image or not taps or image[-1] is None or None in taps:
        return None
    return _Groups(image[-1], taps)  # type: ignore[arg-type]


def _replace_grouped(graph: Graph) -> list[str]:
    """Replace grouped convolutions that would run on a CPU, in place.

    Returns:
        Names of convolutions with unknown groups, and of those that other ops still need.
    """
    mapping: dict[Tensor, Tensor] = {}
    unknown: list[str] = []
    for node in [node for node in graph.nodes.values() if node.op in _CONVOLUTIONS]:
        if not _is_plain(node.attrs) or (graph.device.is_gpu and "CPU" not in node.device.upper()):
            continue
        groups = _groups(node)
        if groups is None:
            unknown.append(node.name)
        elif groups.number > 1:
            builder = _NodeBuilder(graph, node)
            expand = _depthwise if _has_depthwise_kernel(node, groups) else _one_by_one
            mapping[node.out()] = expand(builder, groups)
    graph.replace_tensors(mapping)
    graph.prune()
    return unknown + [tensor.node.name for tensor in mapping if tensor.node.name in graph.nodes]


def _has_depthwise_kernel(node: Node, groups: _Groups) -> bool:
    strides = node.attrs["strides"].list.i
    return len(groups.filter) == 4 and groups.filter[-2] == 1 and strides[1] == strides[2]


class _NodeBuilder:
    """Adds the nodes that replace one node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph = graph
        self.node = node
        self.dtype = node.outputs[0][0]

    def _add(self, op: str, inputs: Sequence[Tensor], attrs: dict[str, Any], outputs: Sequence[Any]) -> Node:
        return self.graph.add_beside(self.node, op, inputs, attrs, outputs)

    def ints(self, value: int | tuple[int, ...]) -> Tensor:
        """Add a constant of integers."""
        return add_constant(self.graph, f"{self.node.name}/sizes", value, tf.int32)

    def reshape(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Add a reshape."""
        attrs = op_attrs(T=self.dtype, Tshape=tf.int32)
        return self._add("Reshape", [tensor, self.ints(shape)], attrs, [(self.dtype, shape)]).out()

    def split(self, tensor: Tensor, number: int) -> list[Tensor]:
        """Add a split of the last dimension."""
        assert tensor.shape is not None and tensor.shape[-1] is not None
        shape = (*tensor.shape[:-1], tensor.shape[-1] // number)
        attrs = op_attrs(T=self.dtype, num_split=number)
        node = self._add("Split", [self.ints(len(shape) - 1), tensor], attrs, [(self.dtype, shape)] * number)
        return [node.out(index) for index in range(number)]

    def concat(self, tensors: Sequence[Tensor], shape: Any) -> Tensor:
        """Add a concatenation over the last dimension."""
        attrs = op_attrs(T=self.dtype, Tidx=tf.int32, N=len(tensors))
        return self._add("ConcatV2", [*tensors, self.ints(len(shape) - 1)], attrs, [(self.dtype, shape)]).out()

    def convolution(self, op: str, inputs: Sequence[Tensor], shape: Any) -> Tensor:
        """Add a convolution with the attributes of the node, as far as the op has them."""
        attrs = dict(self.node.attrs)
        if op.startswith("Depthwise"):
            attrs.pop("use_cudnn_on_gpu", None)
        return self._add(op, inputs, attrs, [(self.dtype, shape)]).out()

    def sizes_of_group(self, sizes: Tensor, channels: int) -> Tensor:
        """Add the sizes of the image of one group; an unknown batch size is read from `sizes`."""
        rank = len(self.node.out().shape or ())
        attrs = op_attrs(T=sizes.dtype, Index=tf.int32)
        begin, number = self.ints((0,)), self.ints((rank - 1,))
        others = self._add("Slice", [sizes, begin, number], attrs, [(sizes.dtype, (rank - 1,))])
        attrs = op_attrs(T=sizes.dtype, Tidx=tf.int32, N=2)
        last = add_constant(self.graph, f"{self.node.name}/channels", (channels,), sizes.dtype)
        return self._add("ConcatV2", [others.out(), last, self.ints(0)], attrs, [(sizes.dtype, (rank,))]).out()


def _depthwise(builder: _NodeBuilder, groups: _Groups) -> Tensor:
    """Add a depthwise convolution, for one input channel per group."""
    node, shape = builder.node, builder.node.out().shape
    if node.op in _FORWARD:
        taps = builder.reshape(node.inputs[1], groups.depthwise)
        return builder.convolution("DepthwiseConv2dNative", [node.inputs[0], taps], shape)
    if node.op in _TO_INPUT:
        taps = builder.reshape(node.inputs[1], groups.depthwise)
        operands = [node.inputs[0], taps, node.inputs[2]]
        return builder.convolution("DepthwiseConv2dNativeBackpropInput", operands, shape)
    operands = [node.inputs[0], builder.ints(groups.depthwise), node.inputs[2]]
    gradient = builder.convolution("DepthwiseConv2dNativeBackpropFilter", operands, groups.depthwise)
    return builder.reshape(gradient, groups.filter)


def _one_by_one(builder: _NodeBuilder, groups: _Groups) -> Tensor:
    """Add one convolution per group."""
    node, shape, number = builder.node, builder.node.out().shape, groups.number
    assert shape is not None and shape[-1] is not None
    part = (*shape[:-1], shape[-1] // number)
    operands: list[Sequence[Tensor]]
    if node.op in _FORWARD:
        operands = [builder.split(tensor, number) for tensor in node.inputs]
    elif node.op in _TO_INPUT:
        sizes = builder.sizes_of_group(node.inputs[0], shape[-1] // number)
        operands = [[sizes] * number, *(builder.split(tensor, number) for tensor in node.inputs[1:])]
    else:
        images, gradients = builder.split(node.inputs[0], number), builder.split(node.inputs[2], number)
        taps = builder.ints((*groups.filter[:-1], groups.filter[-1] // number))
        operands = [images, [taps] * number, gradients]
    return builder.concat([builder.convolution(node.op, each, part) for each in zip(*operands, strict=True)], shape)
