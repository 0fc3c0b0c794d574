"""Compare a graph before and after a pass or a step, as text and by its results; a helper, no test."""

import difflib
import inspect
import re

import numpy as np
import tensorflow as tf
from graph_text import parsed

from rewriters.ir.graph_pass import run_pass
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.text import METADATA_MARK, graph_text


class Rewriting:
    """A function under test that returns a new graph; `run` tells whether both graphs are run, too."""

    def __init__(self, rewrite, run, inline_constants=True):
        self.rewrite, self.run, self.inline_constants = rewrite, run, inline_constants

    def check(self, text):
        """Rewrite the graph that `text` describes, and compare the text of the result.

        Lines with `-` are in the graph before alone, lines with `+` in the graph after alone. A line that is indented
        further continues the one above. Both graphs compute the same.
        """
        lines = unwrapped(text)
        before, want = ([line.lstrip("+- ") for line in lines if line[0] != sign] for sign in "+-")
        graph = parsed("\n".join(before))
        assert_equal_lines(self.lines(graph), before)
        new = self.rewrite(graph)
        assert_equal_lines(self.lines(new), want)
        if self.run:
            for got, expected in zip(results(new), results(parsed("\n".join(before))), strict=True):
                np.testing.assert_allclose(got, expected, 1e-5, 1e-6)

    def lines(self, graph):
        """Return the lines of a graph's text without indentation, and with all arguments in the first one."""
        arguments, _, ops = graph_text(graph, inline_constants=self.inline_constants, bodies=False).partition("):\n")
        names = ", ".join(line.strip(" ,") for line in arguments.splitlines()[1:])
        return [f"graph({names})", *map(str.strip, ops.splitlines())]


def step(edit, run=True):
    """Return the rewriting by a step that edits a graph in place, and tells whether it changed anything."""

    def rewrite(graph):
        before = graph_text(graph)
        arguments = [StaticEvaluator(graph)] if len(inspect.signature(edit).parameters) > 1 else []
        assert edit(graph, *arguments) == (graph_text(graph) != before)
        return graph

    return Rewriting(rewrite, run)


def passes(make, run=True, inline_constants=True):
    """Return the rewriting by the pass that `make` returns for a graph."""
    return Rewriting(lambda graph: run_pass(make(graph), graph).graph, run, inline_constants)


def unwrapped(text):
    return re.sub(r"\n {6,}", " ", inspect.cleandoc(text)).splitlines()


def assert_lines(lines, text):
    """Compare lines of a graph's text, without indentation and metadata, with those of a text."""
    assert_equal_lines([line.partition(METADATA_MARK)[0].strip() for line in lines], unwrapped(text))


def new_lines(before, after):
    """Return the lines of a graph's text that the text of the graph before lacks."""
    return [line for line in after.splitlines() if line not in before.splitlines()]


def assert_equal_lines(got, want):
    assert got == want, "\n" + "\n".join(difflib.unified_diff(want, got, "expected", "result", n=99, lineterm=""))


def traced(graph):
    """Return the function of the arguments and the handles of variables that a graph computes."""

    @tf.function(autograph=False)
    def run(*values):
        fed = {tensor.node.name: value for tensor, value in zip(graph.inputs, values, strict=True)}
        definition = graph.to_graph_def()
        nodes = [node for node in definition.node if node.name not in fed]
        read = {operand for node in nodes for operand in node.input}
        del definition.node[:]
        definition.node.extend(nodes)
        names = [tensor.name for tensor in graph.outputs if tensor.node.name not in fed]
        names += [node.name for node in graph.keep]
        mapping = {name: fed[name] for name in fed if name in read}
        computed = iter(tf.graph_util.import_graph_def(definition, mapping, names, ""))
        return [fed[t.node.name] if t.node.name in fed else next(computed) for t in graph.outputs]

    return run.get_concrete_function(*(tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs))


def results(graph):
    """Return the results of a graph on random numbers, and the values of its variables afterwards."""
    random, values, variables = np.random.default_rng(0), [], []
    for tensor in graph.inputs:
        is_variable = tensor.node.name in graph.variables
        dtype, shape = graph.variables[tensor.node.name] if is_variable else (tensor.dtype, tensor.shape)
        array = random.normal(size=[3 if size is None else size for size in shape or ()])
        array = np.abs(array) if dtype.is_integer else (array > 0) | (not shape) if dtype.is_bool else array
        values.append(tf.constant(array, dtype))
        if is_variable:
            variables.append(tf.Variable(values[-1]))
            values[-1] = variables[-1].handle
    return [np.array(value) for value in (*traced(graph)(*values), *variables)]
