"""Run steps whose graph a pass has changed; a helper, no test."""

import numpy as np
import tensorflow as tf
from equivalence import Step

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.ir.graph_pass import run_pass
from rewriters.step_importer import StepImporter

RNG = np.random.default_rng(0)


def step_of(function, *shapes, known=True, dtype="float64"):
    """Return a step of a function of random arrays with these shapes."""
    specs = [tf.TensorSpec(shape if known else (None, *shape[1:]), dtype) for shape in shapes]
    batches = [[RNG.normal(size=shape).astype(dtype) for shape in shapes]] * 2
    return Step(tf.function(function).get_concrete_function(*specs), [], batches)


def changed(step, pass_for):
    """Return the graph after the pass that `pass_for` makes for an analysis, and whether it computes the same bits."""
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    graph = run_pass(pass_for(analysis), analysis.graph).graph
    importer = StepImporter(graph, step.concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in step.concrete_fn.inputs[: importer.num_arguments]]
    function = tf.function(lambda *args: importer(args), input_signature=specs).get_concrete_function()
    want, got = step.run(step.concrete_fn), step.run(function)
    assert list(want) == list(got)
    return graph, all(np.array_equal(got[name], want[name]) for name in want)
