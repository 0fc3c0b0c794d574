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
    """

    def __init__(self, graph: Graph, concrete_fn: Any, tier: Tier | None = None) -> None:
        self.graph = graph
        self.concrete_fn = concrete_fn
        self.tier = tier
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
        return _tf_private.pack_outputs(self.concrete_fn, self.values(arguments, self.graph.outputs))

    def values(
        self, arguments: Sequence[Any], tensors: Sequence[Tensor], given: Mapping[Tensor, Any] | None = None
    ) -> list[Any]:
        """Import the graph; the values of some of its tensors.

        Args:
            arguments: What it is fed with, flat.
            tensors: What to return.
            given: Values for readers of tensors, in the place of what is computed.
        """
        outer = _tf_private.default_func_graph()
        assert outer is not None, "the graph is imported inside of a trace"
        if len(arguments) != self.num_arguments:
            raise TypeError(f"expected {self.num_arguments} tensors. Received: {len(arguments)}.")
        captured = [outer.capture(t) for t in self.concrete_fn.captured_inputs]
        fed = self._checked([*arguments, *captured])
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

    def _checked(self, fed: list[Any]) -> list[Any]:
        """The inputs, those behind a check that the rewriting took to have equal leading sizes, or cuts into parts.

        An unknown size that turns out to be 1 would be spread over the other.
        """
        checks = []
        for position, parts in self.graph.divided.items():
            if fed[position].shape[0] is None:
                text = (
                    f"The batch is cut into {parts} micro-batches, so its size has to be a multiple of {parts}. If "
                    "it is the last one of an epoch, drop it: `dataset.batch(size, drop_remainder=True)`, or arrays "
                    "whose length is a multiple of `batch_size`."
                )
                left = tf.shape(fed[position])[0] % parts
                checks.append(tf.debugging.assert_equal(left, 0, message=text))
        checks += self._checks_of_batches(fed)
        for pair in sorted(self.graph.same_size):
            names = [self.graph.inputs[position].node.name for position in pair]
            text = (
                f"The inputs {names[0]!r} and {names[1]!r} of the step were taken to have the same leading size, which "
                "their shapes leave open. Trace the step with known sizes: pass `tf.TensorSpec`s or arrays."
            )
            sizes = [tf.shape(fed[position])[0] for position in pair]
            checks.append(tf.debugging.assert_equal(*sizes, message=text))
        fed = list(fed)
        checked = {position for pair in self.graph.same_size for position in pair}.union(self.graph.divided)
        with tf.control_dependencies(checks):
            for position in checked if checks else ():
                fed[position] = tf.identity(fed[position])
        return fed

    def _checks_of_batches(self, fed: Sequence[Any]) -> list[Any]:
        """That all that is cut is as long: what has another leading size has no row for each sample."""
        first, *others = sorted(self.graph.divided) or [0]
        checks = []
        for other in others:
            if None in (fed[first].shape[0], fed[other].shape[0]):
                names = [self.graph.inputs[position].node.name for position in (first, other)]
                text = (
                    f"The inputs {names[0]!r} and {names[1]!r} of the step have different leading sizes, and both were "
                    "taken for batches. Tell which arguments are: `PipelineParams(batched=[...])`."
                )
                sizes = (tf.shape(fed[position])[0] for position in (first, other))
                checks.append(tf.debugging.assert_equal(*sizes, message=text))
        return checks

    def _used(self, tensor_name: str) -> bool:
        return tensor_name.removesuffix(":0") in self.graph.nodes
