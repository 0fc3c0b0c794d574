"""Functions after canonicalization; a helper, no test."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import Node
from rewriters.step_importer import StepImporter


def canonical(function: Callable[..., Any], *arrays: Any, known: bool = True) -> tuple[Callable[..., Any], list[Node]]:
    """Return the canonical function, and its ops; `known` tells whether the batch size is."""
    specs = [tf.TensorSpec(a.shape if known else (None, *a.shape[1:]), a.dtype) for a in arrays]
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = canonicalize.read_canonical(concrete_fn)
    importer = StepImporter(graph, concrete_fn)
    return tf.function(lambda *args: importer(args), autograph=False), list(graph.nodes.values())
