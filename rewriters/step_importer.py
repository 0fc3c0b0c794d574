"""Import of a rewritten graph into TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Tensor
from rewriters.ir.graph_pass import check_legal
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.legality import Stage
from rewriters.swapping.tiers import Tier

__all__: list[str] = []


class LoopFiles(Protocol):
    """Files of the results of loops."""

    def clear(self) -> None:
        """Delete the files."""


class StepImporter:
    """Imports a graph into the function being traced, any number of times.

    Attributes:
        graph: The graph.
        concrete_fn: The function that it was read from; it holds the captured tensors.
        tier: Target of the graph's swaps, if it has any.
        files: Files of the graph's loops, if it has any; they serve as long as this importer lives.
        sizes: Leading sizes of the arguments that the graph is for, by position, if there is an `other`.
        other: Importer of the step for all other batch sizes, if these may occur.
    """

    def __init__(
        self, graph: Graph, concrete_fn: Any, tier: Tier | None = None, files: LoopFiles | None = None
    ) -> None:
        self.graph = graph
        self.concrete_fn = concrete_fn
        self.tier = tier
        self.files = files
        self.sizes: Mapping[int, int] = {}
        self.other: StepImporter | None = None
        check_legal(graph, Stage.IMPORTABLE)
        self._graph_def = graph.to_graph_def()
        # Swaps, initial buffers of loops and effects of micro-batches are ordered by their edges alone.
        swaps = set() if tier is None else set(tier.operations)
        self._independent = [
            n.name for n in graph.nodes.values() if n.op == "Empty" or n.name in swaps or n.name in graph.unordered
        ]
        tf_internals.register_functions(graph.library)
        self.num_arguments = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)

    @property
    def tiers(self) -> list[Tier]:
        """Return the swap tiers of both graphs."""
        tiers = [self.tier, *(self.other.tiers if self.other is not None else ())]
        return [tier for number, tier in enumerate(tiers) if tier is not None and tier not in tiers[:number]]

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Import the graph, fed with flat `arguments`; return the results in the structure of the original."""
        other = self.other
        if other is None:
            flat = self.values(arguments, self.graph.outputs)
        else:  # Only one branch runs. TensorFlow inlines both, so that operations keep their devices.
            flat = tf.cond(
                self._is_for(arguments),
                lambda: self.values(arguments, self.graph.outputs),
                lambda: other.values(arguments, other.graph.outputs),
            )
        return tf_internals.pack_outputs(self.concrete_fn, flat)

    def for_batch(self, arguments: Sequence[Any]) -> StepImporter:
        """Return the importer for arguments of known sizes: this one or `other`."""
        return self if self.other is None or self._is_for(arguments) else self.other

    def values(
        self, arguments: Sequence[Any], tensors: Sequence[Tensor], given: Mapping[Tensor, Any] | None = None
    ) -> list[Any]:
        """Import this graph, not `other`, with `given` values in place of tensors; return the values of `tensors`."""
        outer = tf_internals.default_func_graph()
        assert outer is not None, "the graph is imported inside of a trace"
        fed = [outer.capture(t) for t in (*self._checked(arguments), *self.concrete_fn.captured_inputs)]
        mapping = {placeholder.name: value for placeholder, value in zip(self.graph.inputs, fed, strict=True)}
        names = [t.name for t in tensors]
        results = tf.graph_util.import_graph_def(
            self._graph_def,
            input_map={
                **{name: value for name, value in mapping.items() if self._used(name)},
                **{tensor.name: value for tensor, value in (given or {}).items()},
            },
            return_elements=[*names, *self._independent] or None,
            name="",
        )
        imported = list(results or [])
        tf_internals.run_independently(imported[len(names) :])
        # An argument that is returned unchanged is not part of the import.
        return [mapping.get(name, result) for name, result in zip(names, imported, strict=False)]

    def abandon(self) -> None:
        """Release everything that a failed step has left in tiers and files."""
        for tier in self.tiers:
            tier.clear()
        for importer in (self, self.other):
            if importer is not None and importer.files is not None:
                importer.files.clear()

    def _is_for(self, arguments: Sequence[Any]) -> Any:
        """Return whether the graph is for arguments of these sizes."""
        sizes = [tf.shape(arguments[position])[0] for position in self.sizes]
        return tf.reduce_all(tf.equal(tf.stack(sizes), list(self.sizes.values())))

    def _checked(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments, behind a check of those that are assumed to have equal leading sizes.

        An unknown size that turns out to be 1 would be broadcast.
        """
        if len(arguments) != self.num_arguments:
            raise TypeError(f"expected {self.num_arguments} tensors. Received: {len(arguments)}.")
        if self.sizes:
            return [_apart(t) if p in self.sizes else t for p, t in enumerate(arguments)]
        checks = []
        for pair in sorted(self.graph.same_size):
            names = [self.graph.inputs[position].node.name for position in pair]
            text = (
                f"The inputs {names[0]!r} and {names[1]!r} of the step were taken to have the same leading size, which "
                "their shapes leave open. Trace the step with known sizes: pass `tf.TensorSpec`s or arrays."
            )
            sizes = [tf.shape(arguments[position])[0] for position in pair]
            checks.append(tf.debugging.assert_equal(*sizes, message=text))
        checked = {position for pair in self.graph.same_size for position in pair}
        arguments = list(arguments)
        with tf.control_dependencies(checks):
            for position in checked if checks else ():
                arguments[position] = tf.identity(arguments[position])
        return arguments

    def _used(self, tensor_name: str) -> bool:
        return tensor_name.removesuffix(":0") in self.graph.nodes


def specialise_shapes(concrete_fn: Any, shapes: Mapping[int, Sequence[int | None]]) -> Any:
    """Return a traced function for arguments of known sizes, with the same operations and names.

    `shapes` are by the position of an argument; other arguments keep theirs.
    """
    importer = StepImporter(from_concrete_function(concrete_fn), concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete_fn.inputs[: importer.num_arguments]]
    for position, shape in shapes.items():
        specs[position] = tf.TensorSpec(shape, specs[position].dtype)

    def run(*values: Any) -> Any:
        return importer(values)

    specialised = tf.function(run, autograph=False).get_concrete_function(*specs)
    tf_internals.share_variables(concrete_fn, specialised)
    return specialised


def _apart(argument: Any) -> Any:
    """Return all rows of an argument, as a tensor whose size TensorFlow does not identify with that of the argument.

    Grappler propagates sizes from one branch to the whole graph, also from a branch that does not run. It would
    conclude that each batch has the size of the specialised branch. Rows that are sliced share the memory.
    """
    return argument[: tf.shape(argument)[0]]
