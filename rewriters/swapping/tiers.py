"""Where swapped tensors are: the codec pair f and its inverse of TFLMS, section 4.2.1, as operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node, Tensor, from_tf_graph
from rewriters.ir.static_values import type_attr
from rewriters.swapping.spill_store import SpillStore

__all__: list[str] = []

HOST = "/device:CPU:0"


class Tier(Protocol):
    """A place outside of the device's memory.

    Attributes:
        operations: Names of the stateful operations that it added.
    """

    operations: list[str]

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Add the operation that takes a tensor away, to be brought back `times`; its result stands for it there."""

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Add the operation that brings it back, after `control`; its result is the tensor `like`."""

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node | None:
        """Have what was brought back for these readers freed at once after them, by an operation if that takes one."""

    def clear(self) -> None:
        """Give up what a step that failed has left."""

    def reset_peak(self, allocated: Callable[[], int]) -> None:
        """Start a new measurement of `peak_bytes`; `allocated` tells the allocator's peak since it was asked last."""

    def peak_bytes(self) -> int:
        """Most bytes at a time on the device: the allocator's, and what the tier has there unseen by it; or 0."""


class HostTier:
    """Host memory beside an accelerator.

    Both operations are identities placed on the host; TensorFlow copies at the border (section 3.4).
    """

    def __init__(self) -> None:
        self.operations: list[str] = []

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """An identity on the host."""
        del times
        return graph.add(_identity(tensor, tensor, name, [])).out()

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Another one, from which the readers copy."""
        return graph.add(_identity(held, like, name, [control])).out()

    def release(self, graph: Graph, name: str, readers: list[Node]) -> None:
        """No operation: it is freed at once."""

    def clear(self) -> None:
        """Nothing is left."""

    def reset_peak(self, allocated: Callable[[], int]) -> None:
        """Nothing is held."""

    def peak_bytes(self) -> int:
        """Copies on the device are the allocator's."""
        return 0


class SkeletonTier:
    """Stands for the disk tier where a graph is only looked at: the operations, without functions behind them."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """One that makes a number."""
        del times
        return graph.add(Node(name, "PyFunc", [tensor], (), {}, HOST, [(tf.int64, ())])).out()

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """One that makes the tensor, and one that checks its shape: the order of all others depends on how many."""
        outputs = [(like.dtype, like.shape)]
        made = graph.add(Node(name, "PyFunc", [held], [control], {}, HOST, outputs))
        return graph.add(Node(f"{name}/EnsureShape", "EnsureShape", [made.out()], (), {}, "", outputs)).out()

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node:
        """One that makes a number."""
        node = graph.add(Node(name, "PyFunc", (), readers, {}, HOST, [(tf.int64, ())]))
        graph.keep.append(node)
        return node

    def clear(self) -> None:
        """Nothing is left."""

    def reset_peak(self, allocated: Callable[[], int]) -> None:
        """Nothing is held."""

    def peak_bytes(self) -> int:
        """Nothing is held."""
        return 0


class DiskTier:
    """Files without a name, read and written by Python functions that the graph calls.

    Attributes:
        store: The files.
        operations: Names of those that call a Python function.
        references: What has to stay alive as long as the graph may run.
    """

    def __init__(self, store: SpillStore) -> None:
        self.store = store
        self.operations: list[str] = []
        self.references: list[Any] = []

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Write a file; the result is its number."""
        store = self.store

        def write(array: np.ndarray) -> np.int64:
            return np.int64(store.write(array, times, name))

        def call(value: Any) -> Any:
            return tf.numpy_function(write, [value], tf.int64, stateful=True)

        (number,) = self._spliced(graph, name, call, [tensor], [((), tf.int64)], [])
        return number

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Read the file with that number."""
        store, dtype = self.store, like.dtype

        def call(number: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(store.read, [number], dtype, stateful=True), like.shape)

        (value,) = self._spliced(graph, name, call, [held], [(like.shape, dtype)], [control])
        return value

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node:
        """Let TensorFlow give back an array that it has no use for any more.

        Its own threads must not do so. It does the next time that it calls Python, which may be long after: without
        this a tensor or two wait at the worst moment of a step.
        """
        store = self.store

        def give() -> np.int64:
            store.look()
            return np.int64(0)

        def call() -> Any:
            return tf.numpy_function(give, [], tf.int64, stateful=True)

        (done,) = self._spliced(graph, name, call, [], [((), tf.int64)], readers)
        graph.keep.append(done.node)
        return done.node

    def clear(self) -> None:
        """Close files that nobody will read any more."""
        self.store.clear()

    def reset_peak(self, allocated: Callable[[], int]) -> None:
        """Of the arrays that are read, and the allocator's meanwhile."""
        self.store.reset_peak(allocated)

    def peak_bytes(self) -> int:
        """Arrays that were read lie in pages of their own."""
        return self.store.peak_bytes()

    def _spliced(
        self, graph: Graph, name: str, call: Any, operands: list[Tensor], results: list[Any], controls: list[Node]
    ) -> list[Tensor]:
        """Trace `call`, and put its operations into the graph, on the host."""
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in operands]
        traced = tf_internals.trace_func_graph(name.replace("/", "_"), call, specs)
        self.references.append(traced)  # It keeps the Python function.
        part = from_tf_graph(traced, traced.inputs, traced.outputs, [])
        outer = dict(zip(part.inputs, operands, strict=True))
        for node in part.nodes.values():
            if node.op == "Placeholder":
                continue
            node.name = graph.unique_name(name if node.op == "PyFunc" else f"{name}/{node.name}")
            node.inputs = [outer.get(t, t) for t in node.inputs]
            if node.op == "PyFunc":
                node.device = HOST
                node.control_inputs = [*node.control_inputs, *controls]
                self.operations.append(node.name)
                node.outputs = [(dtype, shape) for shape, dtype in results]
            graph.add(node)
        return list(part.outputs)


def _identity(operand: Tensor, like: Tensor, name: str, controls: list[Node]) -> Node:
    attrs = {"T": type_attr(like.dtype)}
    return Node(name, "Identity", [operand], controls, attrs, HOST, [(like.dtype, like.shape)])
