"""Ops in loop bodies: their order, and rows that a plan does not provide."""

import keras
import pytest
from equivalence import Cut, find, keras_step, plan, rewrite, rewrite_as
from nets import chain, conv

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import tile_pass
from rewriters.errors import RewriteError
from rewriters.rules.intervals import Interval
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import barrier_segment
from rewriters.tiling.checkpoint_selection import CheckpointSelection
from rewriters.tiling.tile_planner import Grid

COPIES = ("StridedSlice", "PadV2")


def in_tiles(halo, stored=()):
    """Return the graph of three convolutions in tiles."""

    def net(x):
        for name in ("first", "second", "third"):
            x = conv(4, name=name)(x)
        return x

    step = keras_step(net, (12, 16), 2)
    grid = (3, 2) if halo == "recompute" else (3, 1)
    return rewrite(step.concrete_fn, Cut("input", "third", grid, halo=halo, stored=stored)).graph


def between_barriers():
    """Return the graph of convolutions with BatchNorm whose activations are all recomputed."""
    analysis = GraphAnalysis(canonicalize.read_canonical(keras_step(chain, (17, 14), 2).concrete_fn))
    roles = assign_levels(analysis)
    segment = barrier_segment(analysis, "segment1", roles, CheckpointSelection(analysis, roles, batch=2), set())
    return tile_pass.tile_segments(analysis, [tile_pass.plan_segment(analysis, segment, Grid(1, (3, 1)))])


def copies(graph, op, position, gradient):
    """Yield pairs for each op of a type: the ancestors of a copy that only gradient ops read, and the gradient."""
    for function in graph.library.function:
        ops = {node.name: node.op for node in function.node_def}
        operands = {node.name: [i.lstrip("^").partition(":")[0] for i in node.input] for node in function.node_def}
        for name in (name for name in ops if ops[name] == op):
            copy, computed = operands[name][position], operands[name][gradient]
            readers = {ops[other] for other in ops if copy in operands[other]}
            while ops.get(computed) in COPIES:
                computed = operands[computed][0]
            if ops.get(copy) in COPIES and computed in ops and "Conv2D" not in readers:
                yield ancestors(operands, copy), computed


def ancestors(operands, name):
    found, stack = set(), [name]
    while stack:
        new = [operand for operand in operands[stack.pop()] if operand in operands and operand not in found]
        found.update(new)
        stack.extend(new)
    return found


FILTER_GRADIENT = ("Conv2DBackpropFilter", 0, 2)
RELU_GRADIENT = ("ReluGrad", 1, 0)


@pytest.mark.parametrize(
    ("make", "operands", "number"),
    [
        (lambda: in_tiles("recompute"), FILTER_GRADIENT, 1),
        (lambda: in_tiles("carry"), FILTER_GRADIENT, 1),
        (lambda: in_tiles("recompute", ("first", "second")), FILTER_GRADIENT, 3),
        (between_barriers, FILTER_GRADIENT, 2),
        (between_barriers, RELU_GRADIENT, 2),
    ],
    ids=("recompute", "carry", "stored", "barriers-filter", "barriers-relu"),
)
def test_rows_for_gradient_ops_wait_for_gradient(make, operands, number):
    waits = [gradient in before for before, gradient in copies(make(), *operands)]
    assert len(waits) == number and all(waits)


def test_loop_that_holds_too_few_rows_is_refused():
    """Rows that are missing inside of the image would be padded, which is right only outside of it."""

    def planned(analysis):
        (segment,) = plans = plan(analysis, [Cut("input", "second", (3, 2))])
        regions, first = segment.loops[0].regions, find(analysis, "first")
        rows, columns = regions[first]
        regions[first] = Interval(rows.lo, rows.hi - 1), columns
        return plans

    def net(x):
        return conv(4, name="second")(conv(4, name="first")(x))

    with pytest.raises(RewriteError, match="fewer rows of `.*first.*` than an op in it reads, .* Please report it"):
        rewrite_as(keras_step(net, (12, 16), 2).concrete_fn, planned)


def test_numbers_are_constants_of_the_iteration():
    """TensorFlow then turns the cube into products, as in the original step."""

    def cubed(x):
        return keras.layers.Conv2D(4, 3)(keras.ops.power(conv(4)(x), 3.0))

    step = keras_step(cubed, (16, 16))
    rewritten = tflms_sft.rewrite(step.function, tflms_sft.SFTParams((2, 2)), *step.specs)
    exponents = [
        next((other.op for other in function.node_def if other.name == node.input[1].split(":")[0]), "argument")
        for function in rewritten.concrete_function.graph.as_graph_def().library.function
        for node in function.node_def
        if node.op == "Pow" and "gradient" not in node.name
    ]
    assert exponents and set(exponents) == {"Const"}
