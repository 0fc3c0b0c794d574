"""Tiers: places of swapped tensors, with the codec pair f and f⁻¹ of TFLMS (section 4.2.1) as ops."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node, Shape, Tensor
from rewriters.ir.graph_reader import from_tf_graph
from rewriters.ir.static_values import op_attrs
from rewriters.swapping.spill_store import SpillStore

__all__: list[str] = []

HOST = "/device:CPU:0"

_NUMBER = (tf.int64, ())
"""Type and shape of the number of a file or of a record."""


class Tier(abc.ABC):
    """A place outside of the device's memory. By default, the allocator counts all copies, and the runtime frees them.

    Attributes:
        operations: Names of the stateful ops that the tier has added to graphs.
        is_skeleton: Whether its graphs are for the memory model alone, and never run.
    """

    is_skeleton = False

    def __init__(self) -> None:
        self.operations: list[str] = []

    @abc.abstractmethod
    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Add the swap-out of a tensor that is swapped in `times` times; return the handle for swap-ins."""

    @abc.abstractmethod
    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Add a swap-in that runs after `control`; return the copy, with the type and shape of `like`."""

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node | None:
        """Free a copy right after its readers; return the op that does it, `None` if the runtime does it by itself."""
        del graph, name, readers
        return None

    @abc.abstractmethod
    def swap_out_elements(self, body: Graph, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Add the swap-out of tensors to the body of a loop; return their handle, a number, for one swap-in."""

    @abc.abstractmethod
    def swap_in_elements(self, body: Graph, held: Tensor, like: Sequence[Tensor], name: str) -> list[Tensor]:
        """Add the swap-in of tensors to the body of a loop; return the copies, with the types and shapes of `like`."""

    def clear(self) -> None:  # noqa: B027
        """Discard the tensors that a failed step has left in the tier."""

    def reset_peak(self, allocated: Callable[[], int]) -> None:  # noqa: B027
        """Start a new measurement of `peak_bytes`; `allocated` returns the allocator's peak since its last call."""

    def peak_bytes(self) -> int:
        """Return the peak of the allocator's bytes plus the tier's bytes that no allocator counts; or 0."""
        return 0


class MemoryStore:
    """Records in the memory of this process."""

    def __init__(self) -> None:
        self._records: dict[int, list[np.ndarray]] = {}
        self._numbers = itertools.count(1)

    def write_record(self, arrays: Sequence[np.ndarray], name: str) -> int:
        """Hold arrays, and return their number."""
        del name
        number = next(self._numbers)
        self._records[number] = list(arrays)
        return number

    def read_record(self, number: Any) -> list[np.ndarray]:
        """Return the arrays with a number, and forget them."""
        return self._records.pop(int(number))

    def clear(self) -> None:
        """Forget all arrays."""
        self._records.clear()


class _StoringTier(Tier):
    """A tier whose store holds the elements of lists, which Python functions write and read.

    Attributes:
        store: The store.
        references: Objects that must stay alive as long as the graph may run.
    """

    def __init__(self, store: MemoryStore | SpillStore) -> None:
        super().__init__()
        self.references: list[Any] = []
        self.store = store

    def swap_out_elements(self, body: Graph, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Add an op that stores tensors as a record and returns its number."""
        store = self.store

        def write(*arrays: np.ndarray) -> np.int64:
            return np.int64(store.write_record(arrays, name))

        def call(*values: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(write, list(values), tf.int64, stateful=True), ())

        (number,), _ = self._spliced(body, name, call, tensors, [((), tf.int64)])
        return number

    def swap_in_elements(self, body: Graph, held: Tensor, like: Sequence[Tensor], name: str) -> list[Tensor]:
        """Add an op that returns the tensors of a record, and ops that set their static shapes."""
        store, dtypes, shapes = self.store, [tensor.dtype for tensor in like], [tensor.shape for tensor in like]

        def call(number: Any) -> Any:
            values = tf.numpy_function(store.read_record, [number], dtypes, stateful=True)
            return [tf.ensure_shape(value, shape) for value, shape in zip(values, shapes, strict=True)]

        return self._spliced(body, name, call, [held], list(zip(shapes, dtypes, strict=True)))[0]

    def clear(self) -> None:
        """Forget the arrays that a failed step has left."""
        self.store.clear()

    def _spliced(
        self,
        graph: Graph,
        name: str,
        call: Any,
        operands: Sequence[Tensor],
        results: Sequence[Any],
        controls: Sequence[Node] = (),
    ) -> tuple[list[Tensor], list[str]]:
        """Trace `call` and splice its ops into a graph, with the Python function on the host.

        Returns:
            The results, and the names of the ops that call a Python function.
        """
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in operands]
        traced = tf_internals.trace_func_graph(name.replace("/", "_"), call, specs)
        self.references.append(traced)  # It keeps the Python function.
        part = from_tf_graph(traced, traced.inputs, traced.outputs, [], graph.device)
        outer = dict(zip(part.inputs, operands, strict=True))
        calls: list[str] = []
        for node in part.nodes.values():
            if node.op == "Placeholder":
                continue
            node.name = graph.unique_name(name if node.op == "PyFunc" else f"{name}/{node.name}")
            node.inputs = [outer.get(t, t) for t in node.inputs]
            if node.op == "PyFunc":
                node.device = HOST
                node.control_inputs = [*node.control_inputs, *controls]
                calls.append(node.name)
                node.outputs = [(dtype, shape) for shape, dtype in results]
            graph.add(node)
        return list(part.outputs), calls


class HostTier(_StoringTier):
    """Host memory of an accelerator.

    Both ops are identities placed on the host; TensorFlow copies between devices (section 3.4). It would copy a tensor
    list with all its elements: those of a loop are held by Python instead.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore())

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Add an identity on the host."""
        del times
        return self._identity(graph, name, tensor, tensor)

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Add another identity on the host, from which TensorFlow copies for the readers."""
        return self._identity(graph, name, held, like, [control])

    def _identity(
        self, graph: Graph, name: str, operand: Tensor, like: Tensor, controls: Sequence[Node] = ()
    ) -> Tensor:
        attrs, outputs = op_attrs(T=like.dtype), [(like.dtype, like.shape)]
        node = Node(name, "Identity", [operand], control_inputs=controls, attrs=attrs, device=HOST, outputs=outputs)
        return graph.add(node).out()


class SkeletonElements:
    """Swaps of the elements of lists in graphs for the memory model: the same ops without Python functions."""

    is_skeleton = True

    def swap_out_elements(self, body: Graph, tensors: Sequence[Tensor], name: str) -> Tensor:
        """Add an op that returns the number of a record."""
        return _python_call(body, name, tensors, [_NUMBER]).out()

    def swap_in_elements(self, body: Graph, held: Tensor, like: Sequence[Tensor], name: str) -> list[Tensor]:
        """Add an op that returns the copies."""
        node = _python_call(body, name, [held], [(tensor.dtype, tensor.shape) for tensor in like])
        return [node.out(index) for index in range(len(like))]


class SkeletonTier(SkeletonElements, Tier):
    """Stand-in for the disk tier in graphs for the memory model: the same ops without Python functions."""

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Add an op that returns the number of a file."""
        del times
        return _python_call(graph, name, [tensor], [_NUMBER]).out()

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Add the ops of `DiskTier`, both of them: the execution order of all others depends on their number."""
        outputs = [(like.dtype, like.shape)]
        copy = _python_call(graph, name, [held], outputs, [control]).out()
        shaped = Node(f"{name}/EnsureShape", "EnsureShape", [copy], device=like.node.device, outputs=outputs)
        return graph.add(shaped).out()

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node:
        """Add an op that runs after the readers."""
        node = _python_call(graph, name, (), [_NUMBER], readers)
        graph.keep.append(node)
        return node


def _python_call(
    graph: Graph,
    name: str,
    operands: Sequence[Tensor],
    outputs: Sequence[tuple[tf.DType, Shape]],
    controls: Sequence[Node] = (),
) -> Node:
    return graph.add(Node(name, "PyFunc", operands, control_inputs=controls, device=HOST, outputs=outputs))


class HostSkeletonTier(SkeletonElements, HostTier):
    """Stand-in for the host tier in graphs for the memory model."""


class DiskTier(_StoringTier):
    """Unnamed files that Python functions write and read; the graph calls the functions."""

    store: SpillStore

    def swap_out(self, graph: Graph, tensor: Tensor, name: str, times: int) -> Tensor:
        """Add an op that writes a file and returns its number."""
        store = self.store

        def write(array: np.ndarray) -> np.int64:
            return np.int64(store.write(array, times, name))

        def call(value: Any) -> Any:
            return tf.numpy_function(write, [value], tf.int64, stateful=True)

        return self._ordered_by_edges(graph, name, call, [tensor], ((), tf.int64), [])

    def swap_in(self, graph: Graph, held: Tensor, like: Tensor, control: Node, name: str) -> Tensor:
        """Add an op that reads the file with a number, and one that sets the static shape."""
        store, dtype = self.store, like.dtype

        def call(number: Any) -> Any:
            return tf.ensure_shape(tf.numpy_function(store.read, [number], dtype, stateful=True), like.shape)

        value = self._ordered_by_edges(graph, name, call, [held], (like.shape, dtype), [control])
        value.node.device = like.node.device
        return value

    def release(self, graph: Graph, name: str, readers: list[Node]) -> Node:
        """Add a call into Python, so that TensorFlow releases arrays that it no longer uses.

        TensorFlow's own threads must not release NumPy arrays. It does so at its next call into Python, which may be
        long after the last reader: without this op one or two tensors stay allocated at the peak.
        """
        store = self.store

        def release() -> np.int64:
            store.record_peak()
            return np.int64(0)

        def call() -> Any:
            return tf.numpy_function(release, [], tf.int64, stateful=True)

        done = self._ordered_by_edges(graph, name, call, [], ((), tf.int64), readers)
        graph.keep.append(done.node)
        return done.node

    def reset_peak(self, allocated: Callable[[], int]) -> None:
        """Start a new measurement in the store."""
        self.store.reset_peak(allocated)

    def peak_bytes(self) -> int:
        """Return the peak of the store: arrays that were read lie in memory that no allocator of TensorFlow counts."""
        return self.store.peak_bytes()

    def _ordered_by_edges(
        self, graph: Graph, name: str, call: Any, operands: list[Tensor], result: Any, controls: list[Node]
    ) -> Tensor:
        """Splice `call` into the graph, and record its Python function as an op that edges alone order."""
        (tensor,), calls = self._spliced(graph, name, call, operands, [result], controls)
        self.operations.extend(calls)
        return tensor
