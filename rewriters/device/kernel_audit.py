"""Kernel audit: the ops of a traced step that a GPU cannot run, and the tensors that cross between host and GPU.

TensorFlow registers the GPU kernels of a CUDA build on machines without a GPU, too. No Python interface leads to its
placer, which decides where an op runs, so `_Placement` follows the rules of the placer for one GPU and one CPU
(tensorflow/core/common_runtime/placer.cc, colocation_graph.cc, lower_while_op.cc, framework/memory_types.cc):

- An explicit device counts. An op in a function without one takes the device of its loop or call.
- Any other op runs on the GPU if a GPU kernel is registered for its types.
- An op that reads only the shape of its operand (`Shape`, `Size`, `Rank`) follows the operand.
- A generator, an op without operands, follows its consumers if all run on one device.
- TensorFlow lowers loops, conditionals and calls to ops that hold int32, strings and variable handles in host memory
  and other types on their own device.

Variables are assumed on the GPU. Explicit colocation, which no pass keeps, and Grappler's changes are not modelled.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import BRANCHES, LOOPS, Graph, Node, Tensor, shape_bytes
from rewriters.ir.graph_reader import from_concrete_function, is_call, is_xla_call
from rewriters.ir.loop_bodies import branches_of, called_function, function_of
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

MAX_SMALL_BYTES = 1024
"""Bytes of the largest tensor that counts as a scalar, a shape or a table of positions."""

UNKNOWN_SIZE = 32
"""Assumed size of a dimension whose size varies, such as the rows of a tile."""

_ON_HOST = frozenset((tf.int32.as_datatype_enum, tf.string.as_datatype_enum, tf.resource.as_datatype_enum))
"""Types that the ops of control flow hold in host memory (framework/memory_types.cc, MTypeFromDType)."""


@dataclasses.dataclass(frozen=True)
class AuditedOp:
    """An op type with the types of a step.

    Attributes:
        op: Type of the op.
        dtype: As in `MissingKernel`.
        has_kernel: Whether a GPU kernel is registered for its types.
        host_arguments: Names of its operands and results in host memory.
        in_loop: Whether it runs in a loop.
    """

    op: str
    dtype: str
    has_kernel: bool
    host_arguments: tuple[str, ...]
    in_loop: bool


@dataclasses.dataclass(frozen=True)
class MissingKernel:
    """An op without a GPU kernel for its types.

    Attributes:
        op: Type of the op.
        dtype: Type of its first result, or of its first operand if it has none.
        name: Name of the op.
        where: Name of the function of the loop, conditional or call around the op; empty in the step itself.
    """

    op: str
    dtype: str
    name: str
    where: str


@dataclasses.dataclass(frozen=True)
class AuditedTensor:
    """A tensor of more than `MAX_SMALL_BYTES`.

    Attributes:
        op: Type of the op that computes it.
        name: Name of the tensor.
        dtype: Element type.
        num_bytes: Bytes, with assumed sizes for unknown dimensions.
        where: As in `MissingKernel`.
    """

    op: str
    name: str
    dtype: str
    num_bytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies between host and GPU, without swaps.

    Attributes:
        loop: Name of the loop, whose every iteration makes the copies; empty for those outside of loops.
        small_to_host: Number of small tensors that are copied to host memory. The ops that wait for such a copy wait
            for all kernels that were launched before it.
        small_to_gpu: Number of small tensors that are copied to the GPU.
        tensors: Larger tensors.
    """

    loop: str
    small_to_host: int
    small_to_gpu: int
    tensors: tuple[AuditedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the larger tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class KernelAudit:
    """Result of an audit.

    Attributes:
        num_ops: Number of ops, those of loops, conditionals and calls included.
        ops: Op types with their types, without ops on an explicit CPU, loops, conditionals and calls.
        missing: Ops without a GPU kernel for their types, without those on an explicit CPU, such as swaps.
        host_tensors: Results of more than `MAX_SMALL_BYTES` of ops that keep them in host memory, without swaps.
        copies: Copies of each loop, and those outside of loops.
        num_swaps: Number of tensors that cross to or from an op on an explicit CPU.
    """

    num_ops: int
    ops: frozenset[AuditedOp]
    missing: tuple[MissingKernel, ...]
    host_tensors: tuple[AuditedTensor, ...]
    copies: tuple[Copies, ...]
    num_swaps: int

    @property
    def loops(self) -> tuple[Copies, ...]:
        """Copies of each iteration, by loop."""
        return tuple(copies for copies in self.copies if copies.loop)


def check_build() -> None:
    """Raise `RewriteError` if TensorFlow is a build without GPU kernels."""
    if not tf.test.is_built_with_cuda():
        raise RewriteError(
            "The installed TensorFlow has no GPU kernels to check. Install a build with CUDA: "
            "`pip install tensorflow` on Linux."
        )


def audit_kernels(concrete_fn: Any) -> KernelAudit:
    """Audit all ops of a traced function and of the functions that it uses.

    Raises:
        RewriteError: If TensorFlow is a build without GPU kernels, or if a function cannot be read.
    """
    return audit_graph(from_concrete_function(concrete_fn))


def audit_graph(graph: Graph) -> KernelAudit:
    """Audit all ops of a graph, as `audit_kernels` does."""
    check_build()
    graph = graph.copy()
    graph.prune()
    auditor = _Auditor()
    auditor.visit(graph, "", "", "")
    return auditor.result()


def gpu_kernel(node: Node) -> tf_internals.Kernel | None:
    """Return the kernel that runs an op on a GPU; `None` if none is registered for its types."""
    types = {
        name: tf_internals.types_in(node.attrs[name]) if name in node.attrs else default
        for name, default in tf_internals.type_attributes(node.op).items()
    }
    for kernel in tf_internals.registered_kernels(node.op, "GPU"):
        if all(allowed.issuperset(types.get(name, ())) for name, allowed in kernel.types.items()):
            return kernel
    return None


def reads_gpu_memory(graph: Graph, node: Node, tensor: Tensor) -> bool:
    """Return whether an op of a graph runs on a GPU, and its kernel reads an operand in the GPU's memory."""
    kernel = gpu_kernel(node) if graph.device_of(node).startswith("GPU") else None
    if kernel is None:
        return False
    names, _ = tf_internals.argument_names(node.op, node.attrs)
    return not any(t == tensor and name in kernel.host_arguments for t, name in zip(node.inputs, names, strict=True))


def _is_lowered(node: Node) -> bool:
    """Return whether TensorFlow replaces an op by the ops of its functions."""
    return node.op in LOOPS or node.op in BRANCHES or is_call(node)


class _Placement:
    """Device and memory of the ops of one graph.

    Args:
        graph: The graph.
        device: Explicit device of the loop or call that the graph is a function of; may be empty.
        is_condition: Whether the graph is the condition of a loop, whose result the executor reads in host memory.
    """

    def __init__(self, graph: Graph, device: str, is_condition: bool) -> None:
        self._inherited = device
        self._is_condition = is_condition
        self._arguments = {tensor.node for tensor in graph.inputs}
        self._kernels: dict[Node, tf_internals.Kernel | None] = {}
        self._on_gpu: dict[Node, bool] = {}
        self._names: dict[Node, tuple[list[str], list[str]]] = {}
        consumers: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in graph.nodes.values():
            for source, _ in node.inputs:
                consumers[source].append(node)
        order = graph.execution_order()
        for node in order:
            if node.inputs or node in self._arguments:
                self._place(node)
        for node in order:
            if node not in self._on_gpu:
                self._place(node)
                if consumers[node] and not self.device(node) and len(node.outputs) == 1:
                    self._on_gpu[node] &= any(self._on_gpu.get(consumer, True) for consumer in consumers[node])

    def _place(self, node: Node) -> None:
        has_kernel = node in self._arguments or _is_lowered(node) or is_xla_call(node)
        self._kernels[node] = None if has_kernel else gpu_kernel(node)
        has_kernel = has_kernel or self._kernels[node] is not None
        self._names[node] = tf_internals.argument_names(node.op, node.attrs)
        on_gpu = has_kernel and not self.is_on_explicit_cpu(node)
        if node.op in ops_with(Trait.SHAPE_QUERY) and len(node.inputs) == 1 and not self.device(node):
            on_gpu = on_gpu and self._on_gpu[node.inputs[0].node]
        self._on_gpu[node] = on_gpu

    def device(self, node: Node) -> str:
        """Return the explicit device of an op, its own or that of the loop or call around it; may be empty."""
        return node.device or self._inherited

    def is_on_explicit_cpu(self, node: Node) -> bool:
        """Return whether the device of an op is explicitly the CPU."""
        return "CPU" in self.device(node).upper()

    def lacks_kernel(self, node: Node) -> bool:
        """Return whether an op runs on the CPU because no GPU kernel is registered for its types."""
        if node in self._arguments or _is_lowered(node) or is_xla_call(node) or self.is_on_explicit_cpu(node):
            return False
        return self._kernels[node] is None

    def result_on_host(self, tensor: Tensor) -> bool:
        """Return whether the op that computes a tensor leaves it in host memory."""
        return self._on_host(tensor.node, tensor.dtype, self._names[tensor.node][1], tensor.index)

    def operand_on_host(self, node: Node, position: int) -> bool:
        """Return whether an op reads an operand in host memory."""
        if node.op in BRANCHES and not position:
            return True
        return self._on_host(node, node.inputs[position].dtype, self._names[node][0], position)

    def output_on_host(self, tensor: Tensor) -> bool:
        """Return whether a result of the graph leaves it in host memory."""
        return self._is_condition or "CPU" in self._inherited.upper() or tensor.dtype.as_datatype_enum in _ON_HOST

    def _on_host(self, node: Node, dtype: tf.DType, names: Sequence[str], position: int) -> bool:
        if not self._on_gpu[node]:
            return True
        kernel = self._kernels[node]
        if kernel is None or dtype in (tf.string, tf.resource):
            return dtype.as_datatype_enum in _ON_HOST
        return position < len(names) and names[position] in kernel.host_arguments


class _Auditor:
    """Collects what the audit finds in a graph and in its functions."""

    def __init__(self) -> None:
        self._num_ops = self._num_swaps = 0
        self._ops: set[AuditedOp] = set()
        self._missing: list[MissingKernel] = []
        self._host_tensors: list[AuditedTensor] = []
        self._copies: dict[str, list[tuple[Tensor, bool, str]]] = {"": []}

    def result(self) -> KernelAudit:
        """Return all findings."""
        copies = []
        for loop, copied in self._copies.items():
            small = [to_host for tensor, to_host, _ in copied if not _is_large(tensor)]
            large = tuple(_audited(tensor, where) for tensor, _, where in copied if _is_large(tensor))
            copies.append(Copies(loop, sum(small), len(small) - sum(small), large))
        return KernelAudit(
            self._num_ops,
            frozenset(self._ops),
            tuple(self._missing),
            tuple(self._host_tensors),
            tuple(copies),
            self._num_swaps,
        )

    def visit(self, graph: Graph, where: str, loop: str, device: str, is_condition: bool = False) -> None:
        """Audit a graph.

        Args:
            graph: The step, or a function of an op.
            where: As in `MissingKernel`.
            loop: Name of the innermost loop around the graph; may be empty.
            device: Explicit device of the op around the graph; may be empty.
            is_condition: As for `_Placement`.
        """
        placement = _Placement(graph, device, is_condition)
        arguments = {tensor.node for tensor in graph.inputs}
        for node in graph.nodes.values():
            if node in arguments:
                continue
            self._num_ops += 1
            if not _is_lowered(node) and not placement.is_on_explicit_cpu(node):
                self._add(node, placement, where, bool(loop))
        self._copies.setdefault(loop, []).extend((*copy, where) for copy in self._crossing(graph, placement))
        for node in graph.nodes.values():
            if not _is_lowered(node):
                continue
            inner = f"{where}/{node.name}" if where else node.name
            for number, function in enumerate(_functions(graph, node)):
                is_loop = node.op in LOOPS
                around = inner if is_loop else loop
                self.visit(function, inner, around, placement.device(node), is_condition=is_loop and not number)

    def _add(self, node: Node, placement: _Placement, where: str, in_loop: bool) -> None:
        """Record an op, and its results in host memory."""
        dtypes = [dtype for dtype, _ in node.outputs] or [tensor.dtype for tensor in node.inputs]
        dtype, kernel = dtypes[0].name if dtypes else "", gpu_kernel(node)
        host_arguments = () if kernel is None else tuple(sorted(kernel.host_arguments))
        self._ops.add(AuditedOp(node.op, dtype, not placement.lacks_kernel(node), host_arguments, in_loop))
        if placement.lacks_kernel(node):
            self._missing.append(MissingKernel(node.op, dtype, node.name, where))
        results = [node.out(index) for index in range(len(node.outputs))]
        on_host = [tensor for tensor in results if placement.result_on_host(tensor)]
        self._host_tensors += [_audited(tensor, where) for tensor in on_host if _is_large(tensor)]

    def _crossing(self, graph: Graph, placement: _Placement) -> Iterator[tuple[Tensor, bool]]:
        """Yield each tensor that is copied, once for all consumers, and whether it is copied to the host."""
        seen: set[tuple[Tensor, bool]] = set()
        edges: list[tuple[Tensor, bool, bool]] = []
        for node in graph.nodes.values():
            is_swap = placement.is_on_explicit_cpu(node)
            edges += [(t, placement.operand_on_host(node, i), is_swap) for i, t in enumerate(node.inputs)]
        edges += [(tensor, placement.output_on_host(tensor), False) for tensor in graph.outputs]
        for tensor, to_host, is_swap in edges:
            if placement.result_on_host(tensor) == to_host or (tensor, to_host) in seen:
                continue
            seen.add((tensor, to_host))
            if is_swap or placement.is_on_explicit_cpu(tensor.node):
                self._num_swaps += 1
            else:
                yield tensor, to_host


def _functions(graph: Graph, node: Node) -> list[Graph]:
    """Return the functions of a loop, a conditional or a call; the condition of a loop comes first.

    Raises:
        RewriteError: If TensorFlow cannot import one of them.
    """
    functions: list[Graph | None]
    if node.op in LOOPS:
        functions = [function_of(graph, node, attr) for attr in ("cond", "body")]
    elif node.op in BRANCHES:
        functions = [*(branches_of(graph, node) or (None,))]
    else:
        functions = [called_function(graph, node)]
    if None in functions:
        raise RewriteError(f"A function of {node.op} `{node.name}` cannot be read, so its kernels are not checked.")
    return [function for function in functions if function is not None]


def _num_bytes(tensor: Tensor) -> int:
    shape = tensor.shape
    if shape is None:  # TensorFlow infers no shape of a `HostConst`.
        value = tensor.node.attrs.get("value")
        shape = (None, None) if value is None else tuple(dim.size for dim in value.tensor.tensor_shape.dim)
    return shape_bytes(tensor.dtype, shape, UNKNOWN_SIZE)


def _is_large(tensor: Tensor) -> bool:
    return _num_bytes(tensor) > MAX_SMALL_BYTES


def _audited(tensor: Tensor, where: str) -> AuditedTensor:
    return AuditedTensor(tensor.node.op, tensor.name, tensor.dtype.name, _num_bytes(tensor), where)
