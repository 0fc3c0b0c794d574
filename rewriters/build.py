"""From a rewritten graph back to something TensorFlow runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters import _tf_private
from rewriters.graph import Graph, Tensor
from rewriters.tiers import Tier

__all__: list[str] = []


class Importer:
    """Imports a graph into the function being traced, as often as asked.

    Attributes:
        graph: The graph.
        concrete_fn: The function that it was read from; it holds the captured tensors.
        tier: Where the graph swaps to, if it does.
        uneven: What imports the same step for a batch that the graph cannot cut into parts of one size, if such come.
            It swaps to the same tier.
    """

    def __init__(
        self, graph: Graph, concrete_fn: Any, tier: Tier | None = None, uneven: Importer | None = None
    ) -> None:
        self.graph = graph
        self.concrete_fn = concrete_fn
        self.tier = tier
        self.uneven = uneven
        self._graph_def = graph.to_graph_def()
        # Swaps, buffers that loops begin with, and effects of micro-batches: what they wait for, their edges say.
        swaps = set() if tier is None else set(tier.operations)
        self._independent = [
            n.name for n in graph.nodes.values() if n.op == "Empty" or n.name in swaps or n.name in graph.unordered
        ]
        _tf_private.register_functions(graph.library)
        self.num_arguments = len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)

    def __call__(self, arguments: Sequence[Any]) -> Any:
        """Import the graph, fed with flat `arguments`; the results in the structure of the original."""
        checked = self._checked(arguments)
        if self.uneven is None:
            flat = self._imported(checked, self.graph.outputs)
        else:  # Of the two that are imported one runs. TensorFlow inlines both, so that operations keep their devices.
            uneven = self.uneven
            flat = tf.cond(
                self._is_even(checked),
                lambda: self._imported(checked, self.graph.outputs),
                lambda: uneven._imported(checked, uneven.graph.outputs),
            )
        return _tf_private.pack_outputs(self.concrete_fn, flat)

    def for_batch(self, arguments: Sequence[Any]) -> Importer:
        """What imports the graph that runs for arguments whose sizes are known: this, or `uneven`."""
        return self if self.uneven is None or self._is_even(arguments) else self.uneven

    def values(
        self, arguments: Sequence[Any], tensors: Sequence[Tensor], given: Mapping[Tensor, Any] | None = None
    ) -> list[Any]:
        """Import the graph, that for even batches; the values of some of its tensors.

        Args:
            arguments: What it is fed with, flat.
            tensors: What to return.
            given: Values for readers of tensors, in the place of what is computed.
        """
        return self._imported(self._checked(arguments), tensors, given)

    def _imported(
        self, arguments: Sequence[Any], tensors: Sequence[Tensor], given: Mapping[Tensor, Any] | None = None
    ) -> list[Any]:
        """The same, fed with what has been checked."""
        outer = _tf_private.default_func_graph()
        assert outer is not None, "the graph is imported inside of a trace"
        fed = [outer.capture(t) for t in (*arguments, *self.concrete_fn.captured_inputs)]
        mapping = {
            placeholder.name: value
            for placeholder, value in zip(self.graph.inputs, fed, strict=True)
        }
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
        _tf_private.run_independently(found[len(names) :])
        # An argument that is returned as it came is not part of the import.
        return [mapping.get(name, result) for name, result in zip(names, found, strict=False)]

    def abandon(self) -> None:
        """Give up what a step that failed has left in the tier."""
        if self.tier is not None:
            self.tier.clear()

    def _is_even(self, arguments: Sequence[Any]) -> Any:
        """Whether the batch can be cut into parts of one size."""
        position, parts = min(self.graph.divided.items())
        return tf.equal(tf.shape(arguments[position])[0] % parts, 0)

    def _checked(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments, those behind a check that are taken to have equal leading sizes.

        An unknown size that turns out to be 1 would be spread over the other.
        """
        if len(arguments) != self.num_arguments:
            raise TypeError(f"expected {self.num_arguments} tensors. Received: {len(arguments)}.")
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
