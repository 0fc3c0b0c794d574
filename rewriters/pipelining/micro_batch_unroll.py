"""Unrolls micro-batches: copies the gradient part of a step once per micro-batch, and its update once.

Gradients are added one by one in the order in which they are computed, so that at most two exist at a time. A variable
that micro-batches change is carried from one to the next. Results are combined by `micro_batch_reduction.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from rewriters.analysis.autodiff_roles import reads_shape_only, shape_computations
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Graph, Node, Shape, Tensor, ancestors, producers
from rewriters.ir.static_values import add_constant, op_attrs
from rewriters.pipelining.micro_batch_reduction import MicroBatchReduction, ReductionChooser, UnrollSpec
from rewriters.pipelining.step_partition import StepPartition, data_independent_ops

__all__: list[str] = []


class Role(enum.Enum):
    """Purposes of the ops of the new graph."""

    MICRO_BATCH = "runs for one micro-batch"
    SHARED = "runs once"
    SPLIT = "splits an argument"
    ADD = "adds a micro-batch's value to those before"
    COMBINE = "finishes a combined value"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of an op of the new graph.

    Attributes:
        role: Purpose of the op.
        source: Op that it is a copy of, or whose result it combines.
        micro_batch: Number of its micro-batch, if it has one.
    """

    role: Role
    source: Node
    micro_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class UnrolledStep:
    """Graph of a step in micro-batches.

    Attributes:
        graph: The new graph.
        origin: Origin of each of its ops.
        clones: Copies of each per-micro-batch op, in order.
        combined: Reduction of each tensor that leaves micro-batches.
    """

    graph: Graph
    origin: dict[Node, Origin]
    clones: dict[Node, list[Node]]
    combined: dict[Tensor, MicroBatchReduction]


def unroll_micro_batches(analysis: GraphAnalysis, parts: StepPartition, spec: UnrollSpec) -> UnrolledStep:
    """Return a step with the ops that depend on the batch repeated for each micro-batch, and their results combined.

    Raises:
        PipelineError: If a value cannot be combined, or if both micro-batches and the update write a variable.
    """
    return _Unroller(analysis, parts, spec).run()


class _Unroller:
    def __init__(self, analysis: GraphAnalysis, parts: StepPartition, spec: UnrollSpec) -> None:
        self.analysis = analysis
        self.spec = spec
        self.without = data_independent_ops(analysis, parts)
        self.parts = parts
        self.count = spec.micro_batches
        old = analysis.graph
        library = type(old.library)()
        library.CopyFrom(old.library)
        self.graph = Graph({}, [], [], [], library, old.versions, {}, set(old.same_size), device=old.device)
        self.origin: dict[Node, Origin] = {}
        self.once: dict[Node, Node] = {}
        self.clones: dict[Node, list[Node]] = {}
        self.pieces: dict[Node, list[Tensor]] = {}
        self.combined: dict[Tensor, tuple[Tensor, MicroBatchReduction]] = {}
        self.sizes = shape_computations(analysis.order)
        self.chooser = ReductionChooser(analysis, parts, spec)
        self.copies_for_batch: dict[Node, Node] = {}
        self.differs: dict[Node, bool] = {}

    def run(self) -> UnrolledStep:
        if self.count > 1:
            self._refuse_shared_state()
        order = self.analysis.order
        shared = [node for node in order if node not in self.parts.per_micro_batch and node not in self.parts.update]
        for node in shared:
            self._add(node, node.name, None)
        early = self._read_by_micro_batches(shared)
        for node in shared:
            operands = (self.once[t.node].out(t.index) if node in early else self._shared(t) for t in node.inputs)
            self.once[node].inputs = list(operands)
        self._cut_arguments()
        for number in range(self.count):
            for node in (node for node in order if node in self.parts.per_micro_batch):
                name = node.name if self.count == 1 else f"micro_{number}/{node.name}"
                new = self._add(node, name, number)
                new.inputs = [self._operand(node, position, number) for position in range(len(node.inputs))]
        for node in (node for node in order if node in self.parts.update):
            new = self._add(node, node.name, None)
            new.inputs = [self._whole(t) for t in node.inputs]
        self._keep_control_edges()
        self._chain_variables()
        old = self.analysis.graph
        self.graph.inputs = [self.once[t.node].out(t.index) for t in old.inputs]
        self.graph.outputs = [self._whole(t) for t in old.outputs]
        self.graph.keep = [copy for node in old.keep for copy in self._copies(node)]
        self._keep_names()
        combined = {t: how for t, (_, how) in self.combined.items()}
        return UnrolledStep(self.graph, self.origin, self.clones, combined)

    def _keep_names(self) -> None:
        """Keep the original names of tensors that exist once, by which `verify` compares gradients."""
        known = {tensor: whole for tensor, (whole, _) in self.combined.items()}
        self.graph.aliases = {tensor.name: whole for tensor, whole in known.items()}
        for name, tensor in self.analysis.graph.aliases.items():
            if tensor in known:
                self.graph.aliases[name] = known[tensor]
            elif tensor.node in self.once or self.count == 1:
                self.graph.aliases[name] = self._copies(tensor.node)[0].out(tensor.index)

    # Copies ---------------------------------------------------------------------------------------------------

    def _add(self, node: Node, name: str, number: int | None) -> Node:
        new = Node(self.graph.unique_name(name), node.op, (), attrs=node.attrs, outputs=node.outputs)
        new.metadata = node.metadata
        self.graph.add(new)
        self.origin[new] = Origin(Role.SHARED if number is None else Role.MICRO_BATCH, node, number)
        if number is None:
            self.once[node] = new
        else:
            self.clones.setdefault(node, []).append(new)
        return new

    def _of(self, tensor: Tensor, number: int) -> Tensor:
        """Return a tensor as one micro-batch reads it."""
        if tensor.node in self.pieces:
            return self.pieces[tensor.node][number]
        if tensor.node in self.parts.per_micro_batch:
            return self.clones[tensor.node][number].out(tensor.index)
        return self.once[tensor.node].out(tensor.index)

    def _operand(self, node: Node, position: int, number: int) -> Tensor:
        """Return an operand as one micro-batch reads it, times its factor if it has one."""
        value = self._of(node.inputs[position], number)
        factor = self.spec.factors.get((node.name, position))
        if factor is None or self.count == 1:
            return value
        name = f"micro_{number}/{node.name}"
        part = add_constant(self.graph, f"{name}/part", factor, value.dtype)
        attrs, outputs = op_attrs(T=value.dtype), [(value.dtype, value.shape)]
        scaled = self.graph.new_node(f"{name}/scaled", "Mul", [value, part], attrs=attrs, outputs=outputs)
        for new in (part.node, scaled):
            self.origin[new] = Origin(Role.MICRO_BATCH, node, number)
        return scaled.out()

    def _copies(self, node: Node) -> list[Node]:
        return self.clones[node] if node in self.clones else [self.once[node]]

    def _read_by_micro_batches(self, shared: Iterable[Node]) -> set[Node]:
        """Return the shared ops that micro-batches depend on."""
        inside = set(shared)
        read = (t.node for node in self.parts.per_micro_batch for t in node.inputs)
        return ancestors((node for node in read if node in inside), producers)

    def _cut_arguments(self) -> None:
        """Split arguments along the batch axis, which the number of micro-batches has to divide."""
        arguments = (t.node for t in self.analysis.graph.inputs if t.node in self.parts.sources)
        for argument in arguments if self.count > 1 else ():
            whole = self.once[argument]
            dtype, shape = argument.outputs[0]
            axis = self._constant(argument, "axis", 0, tf.int32)
            attrs, outputs = op_attrs(T=dtype, num_split=self.count), [(dtype, shape)] * self.count
            name = f"micro/{argument.name}/split"
            node = self.graph.new_node(name, "Split", [axis, whole.out()], attrs=attrs, outputs=outputs)
            self.origin[node] = Origin(Role.SPLIT, argument)
            self.pieces[argument] = [node.out(number) for number in range(self.count)]
            whole.attrs = {key: value for key, value in whole.attrs.items() if key != "shape"}
            whole.outputs = [(dtype, None if shape is None else (None, *shape[1:]))]

    def _constant(self, source: Node, name: str, value: Any, dtype: tf.DType) -> Tensor:
        constant = add_constant(self.graph, f"micro/{source.name}/{name}", value, dtype)
        self.origin[constant.node] = Origin(Role.COMBINE, source)
        return constant

    # Edges that order effects -----------------------------------------------------------------------------------

    def _keep_control_edges(self) -> None:
        """Copy control edges; a shared op waits for micro-batches only if it has an effect."""
        for node in self.analysis.order:
            for before in dict.fromkeys(node.control_inputs):
                if node.op == "Const" or before.op == "Const":
                    continue
                if node in self.clones:
                    several = before in self.clones
                    for number, copy in enumerate(self.clones[node]):
                        copy.control_inputs.append(self.clones[before][number] if several else self.once[before])
                elif before not in self.clones:
                    self.once[node].control_inputs.append(self.once[before])
                elif node in self.parts.update or (node.stateful and node.op != "ReadVariableOp"):
                    self.once[node].control_inputs.extend(self.clones[before])

    def _chain_variables(self) -> None:
        """Order the micro-batches that touch a carried variable."""
        for handle in self.parts.carried_variables if self.count > 1 else ():
            touching = dict.fromkeys(n for n, _ in self.analysis.consumers[handle] if n in self.parts.per_micro_batch)
            for number in range(1, self.count):
                for node in touching:
                    self.clones[node][number].control_inputs.extend(self.clones[o][number - 1] for o in touching)

    def _refuse_shared_state(self) -> None:
        written = {h: n for n in self.parts.update if n.may_write_variable for h in n.variable_handles}
        for handle in self.parts.carried_variables:
            if handle in written:
                raise PipelineError(
                    f"Both the forward phase and the update (`{written[handle].name}`) write a variable, so that "
                    "micro-batches would read each other's values. Use `micro_batches=1`."
                )

    # What leaves micro-batches ----------------------------------------------------------------------------------

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor as ops that run once read it."""
        if tensor.node in self.pieces or tensor.node not in self.parts.per_micro_batch:
            return self._shared(tensor)
        if self.count == 1:
            return self._of(tensor, 0)
        if tensor.node in self.sizes or (tensor.node in self.without and tensor.node not in self.analysis.backward):
            return self._copy_for_whole(tensor.node).out(tensor.index)
        if tensor not in self.combined:
            how = self.chooser.of(tensor)
            self.combined[tensor] = self._combine(tensor, how), how
        return self.combined[tensor][0]

    def _shared(self, tensor: Tensor) -> Tensor:
        """Return a shared tensor as ops that run once read it: with the sizes of the batch."""
        if self.count > 1 and tensor.node not in self.parts.update and self._differs_for_batch(tensor.node):
            return self._copy_for_whole(tensor.node).out(tensor.index)
        return self.once[tensor.node].out(tensor.index)

    def _differs_for_batch(self, node: Node) -> bool:
        """Return whether a shared op has another value in the step for the batch."""
        if node not in self.differs:
            if node.op == "Const":
                self.differs[node] = self._value_for_whole(node) != node.attrs["value"]
            else:
                self.differs[node] = any(self._differs_for_batch(t.node) for t in node.inputs)
        return self.differs[node]

    def _value_for_whole(self, node: Node) -> Any:
        other = self.spec.counterpart(node)
        if other is None or other.op != node.op:
            raise PipelineError(
                f"The constant `{node.name}` exists in the trace for a micro-batch, but not in that for the batch. "
                "Make the step independent of the batch size, or use `micro_batches=1`."
            )
        return other.attrs["value"]

    def _copy_for_whole(self, node: Node) -> Node:
        """Return a copy, with the sizes of the batch, of an op that does not depend on data."""
        if (
            node.op == "Placeholder"
            or node.stateful
            or (node not in self.parts.per_micro_batch and not self._differs_for_batch(node))
        ):
            if node.stateful and any(self._differs_for_batch(t.node) for t in node.inputs):
                raise PipelineError(
                    f"`{node.name}` ({node.op}) runs once, depends on the batch size, and has an effect or reads a "
                    "variable. Pass its result as an argument, or use `micro_batches=1`."
                )
            return self.once[node]
        if node not in self.copies_for_batch:
            measured = (t.node for t in node.inputs if reads_shape_only(node) and t.node.op != "Placeholder")
            if node not in self.without or any(before not in self.without for before in measured):
                raise PipelineError(
                    f"`{node.name}` ({node.op}), which runs once, reads the unknown size of a tensor of a micro-batch. "
                    "Trace the step with a known batch size, or use `micro_batches=1`."
                )
            inputs = [self._copy_for_whole(t.node).out(t.index) for t in node.inputs]
            attrs = dict(node.attrs)
            other = self.spec.counterpart(node)
            if node.op == "Const":
                attrs["value"] = self._value_for_whole(node)
            outputs = other.outputs if other is not None and other.op == node.op else node.outputs
            copied = self.graph.new_node(f"micro/{node.name}/whole", node.op, inputs, attrs=attrs, outputs=outputs)
            self.copies_for_batch[node] = copied
            self.origin[copied] = Origin(Role.COMBINE, node)
        return self.copies_for_batch[node]

    def _combine(self, tensor: Tensor, how: MicroBatchReduction) -> Tensor:
        order = list(self.spec.order(tensor)) or list(range(self.count))
        values = {number: self._of(tensor, number) for number in order}
        if how is MicroBatchReduction.LAST:
            return values[self.count - 1]
        if how in (MicroBatchReduction.CONCAT, MicroBatchReduction.SCALED_CONCAT):
            joined = self._concat(tensor, [values[number] for number in range(self.count)])
            return self._scaled(tensor, joined) if how is MicroBatchReduction.SCALED_CONCAT else joined
        half = tensor.dtype in (tf.float16, tf.bfloat16)
        wide = tf.float32 if half else tensor.dtype
        total: Tensor | None = None
        for number in order:
            value = self._cast(tensor, values[number], wide) if half else values[number]
            if total is None:
                total = value
                continue
            total = self._new(tensor, f"add_{number}", "AddV2", [total, value], op_attrs(T=wide), (wide, tensor.shape))
            self.origin[total.node] = Origin(Role.ADD, tensor.node, number)
        assert total is not None
        if how is MicroBatchReduction.MEAN:
            total = self._scaled(tensor, total)
        return self._cast(tensor, total, tensor.dtype) if half else total

    def _concat(self, tensor: Tensor, values: list[Tensor]) -> Tensor:
        axis = self._constant(tensor.node, "axis", 0, tf.int32)
        attrs = op_attrs(T=tensor.dtype, Tidx=tf.int32, N=len(values))
        shape = None if tensor.shape is None else (None, *tensor.shape[1:])
        return self._new(tensor, "concat", "ConcatV2", [*values, axis], attrs, (tensor.dtype, shape))

    def _scaled(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Return a value divided by the number of micro-batches."""
        part = self._constant(tensor.node, "part", 1 / self.count, value.dtype)
        return self._new(tensor, "mean", "Mul", [value, part], op_attrs(T=value.dtype), (value.dtype, value.shape))

    def _cast(self, tensor: Tensor, value: Tensor, dtype: tf.DType) -> Tensor:
        attrs = op_attrs(SrcT=value.dtype, DstT=dtype, Truncate=False)
        return self._new(tensor, "cast", "Cast", [value], attrs, (dtype, tensor.shape))

    def _new(
        self,
        tensor: Tensor,
        name: str,
        op: str,
        inputs: list[Tensor],
        attrs: Mapping[str, Any],
        output: tuple[tf.DType, Shape],
    ) -> Tensor:
        """Add an op that combines the values of a tensor, and return its result."""
        suffix = f"_{tensor.index}" if tensor.index else ""
        full_name = f"micro/{tensor.node.name}{suffix}/{name}"
        node = self.graph.new_node(full_name, op, inputs, attrs=attrs, outputs=[output])
        self.origin[node] = Origin(Role.COMBINE, tensor.node)
        return node.out()
