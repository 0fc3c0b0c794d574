"""From a rewritten graph back to something TensorFlow runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Tensor, from_concrete_function
from rewriters.swapping.tiers import Tier

__all__: list[str] = []


class StepImporter:
    """Imports a graph into the function being traced, as often as asked.

    Attributes:
        graph: The graph.
        concrete_fn: The function that it was read from; it holds the captured tensors.
        tier: Where the graph swaps to, if it does.
        sizes: Leading sizes of arguments that the graph is for, by position; none if for all that it can be cut for.
        other: What imports the same step for all other batches, if such may come.
    """

    def __init__(self, graph: Graph, concrete_fn: Any, tier: Tier | None = None) -> None:
        self.graph = graph
        self.concrete_fn = concrete_fn
        self.tier = tier
        self.sizes: Mapping[int, int] = {}
        self.other: StepImporter | None = None
        self._graph_def = graph.to_graph_def()
        # Swaps, buffers that loops begin with, and effects of micro-batches: what they wait for, their edges say.
        swaps = set() if tier is None else set(tier.operations)
        self._independent = [
            n.name for n in graph.nodes.values() if n.op == "Empty" or n.name in swaps or n.name in graph.unordered
        ]
        tf_internals.register_functions(graph.library)
        self.num_arguments = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)

    @property
    def tiers(self) -> list[Tier]:
        """Where both graphs swap to."""
        found = [self.tier, *(self.other.tiers if self.other is not None else ())]
        return [tier for number, tier in enumerate(found) if tier is not None and tier not in found[:number]]

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Import the graph, fed with flat `arguments`; the results in the structure of the original."""
        other = self.other
        if other is None:
            flat = self.values(arguments, self.graph.outputs)
        else:  # Of the two that are imported one runs. TensorFlow inlines both, so that operations keep their devices.
            checked = arguments if self.sizes else self._checked(arguments)
            flat = tf.cond(
                self._is_for(checked),
                lambda: self.values(checked, self.graph.outputs),
                lambda: other.values(checked, other.graph.outputs),
            )
        return tf_internals.pack_outputs(self.concrete_fn, flat)

    def for_batch(self, arguments: Sequence[Any]) -> StepImporter:
        """What imports the graph that runs for arguments whose sizes are known: this, or `other`."""
        return self if self.other is None or self._is_for(arguments) else self.other

    def values(
        self, arguments: Sequence[Any], tensors: Sequence[Tensor], given: Mapping[Tensor, Any] | None = None
    ) -> list[Any]:
        """Import this graph, and not `other`; the values of some of its tensors.

        Args:
            arguments: What it is fed with, flat.
            tensors: What to return.
            given: Values for readers of tensors, in the place of what is computed.
        """
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
        found = list(results or [])
        tf_internals.run_independently(found[len(names) :])
        # An argument that is returned as it came is not part of the import.
        return [mapping.get(name, result) for name, result in zip(names, found, strict=False)]

    def abandon(self) -> None:
        """Give up what a step that failed has left in the tiers."""
        for tier in self.tiers:
            tier.clear()

    def _is_for(self, arguments: Sequence[Any]) -> Any:
        """Whether the graph is for arguments of these sizes."""
        if self.sizes:
            found = [tf.shape(arguments[position])[0] for position in self.sizes]
            return tf.reduce_all(tf.equal(tf.stack(found), list(self.sizes.values())))
        position, parts = min(self.graph.divided.items())
        return tf.equal(tf.shape(arguments[position])[0] % parts, 0)

    def _checked(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments, those behind a check that are taken to have equal leading sizes.

        An unknown size that turns out to be 1 would be spread over the other.
        """
        if len(arguments) != self.num_arguments:
            raise TypeError(f"expected {self.num_arguments} tensors. Received: {len(arguments)}.")
        if self.sizes:
            return [_apart(t) if p in self.sizes else t for p, t in enumerate(arguments)]
        checks = self._checks_of_batches(arguments)
        for pair in sorted(self.graph.same_size):
            names = [self.graph.inputs[position].node.name for position in pair]
            text = (
                f"The inputs {names[0]!r} and {names[1]!r} of the step were taken to have the same leading size, which "
                "their shapes leave open. Trace the step with known sizes: pass `tf.TensorSpec`s or arrays."
            )
            sizes = [tf.shape(arguments[position])[0] for position in pair]
            checks.append(tf.debugging.assert_equal(*sizes, message=text))
        checked = {position for pair in self.graph.same_size for position in pair}.union(self.graph.divided)
        arguments = list(arguments)
        with tf.control_dependencies(checks):
            for position in checked if checks else ():
                arguments[position] = tf.identity(arguments[position])
        return arguments

    def _checks_of_batches(self, arguments: Sequence[Any]) -> list[Any]:
        """That all that is cut is as long: what has another leading size has no row for each sample."""
        first, *others = sorted(self.graph.divided) or [0]
        checks = []
        for other in others:
            if None in (arguments[first].shape[0], arguments[other].shape[0]):
                names = [self.graph.inputs[position].node.name for position in (first, other)]
                text = (
                    f"The inputs {names[0]!r} and {names[1]!r} of the step have different leading sizes, and both were "
                    "taken for batches. Tell which arguments are: `PipelineParams(batched=[...])`."
                )
                sizes = (tf.shape(arguments[position])[0] for position in (first, other))
                checks.append(tf.debugging.assert_equal(*sizes, message=text))
        return checks

    def _used(self, tensor_name: str) -> bool:
        return tensor_name.removesuffix(":0") in self.graph.nodes


def specialise_shapes(concrete_fn: Any, shapes: Mapping[int, Sequence[int | None]]) -> Any:
    """A traced function for arguments of known sizes: the same operations, by the same names.

    Args:
        concrete_fn: A traced function, maybe for arguments of any size.
        shapes: Their shapes by the position of an argument; others are as they were.
    """
    importer = StepImporter(from_concrete_function(concrete_fn), concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete_fn.inputs[: importer.num_arguments]]
    for position, shape in shapes.items():
        specs[position] = tf.TensorSpec(shape, specs[position].dtype)

    def run(*values: Any) -> Any:
        return importer(values)

    found = tf.function(run, autograph=False).get_concrete_function(*specs)
    tf_internals.share_variables(concrete_fn, found)
    return found


def _apart(argument: Any) -> Any:
    """All rows of an argument, as a tensor whose size TensorFlow does not take for that of the argument.

    Its optimizer has it that what sizes are somewhere, in a branch that does not run too, they are everywhere, and
    would find that each batch has the size that the branch for one size is for. Rows that are cut out share the memory.
    """
    return argument[: tf.shape(argument)[0]]
