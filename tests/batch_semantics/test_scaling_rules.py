"""Scaling exponents hold: each op runs with zeros, and with operands times 2."""

import math
import types
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from one_op import Const, image
from rule_cases import CASES

from rewriters.batch_semantics.domain import AbstractValue, MixedScalingError, NonlinearError
from rewriters.batch_semantics.scaling_rules import scaling_exponent
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.rules.contraction import CLASSIFICATIONS
from rewriters.rules.elementwise import is_zero

OTHERS = {
    "TopKV2": lambda: {"input": image(), "k": Const(2)},
    "SparseTensorDenseMatMul": lambda: {
        "a_indices": np.array([[0, 1], [2, 0]]),
        "a_values": image(2),
        "a_shape": Const(np.array([3, 4])),
        "b": image(4, 5),
    },
    "MatrixDiagV3": lambda: {
        "diagonal": image(2, 4),
        "k": Const(0),
        "num_rows": Const(4),
        "num_cols": Const(4),
        "padding_value": Const(1.0),
    },
    "Split": lambda: {"axis": Const(3), "value": image(), "num_split": 2},
    "OneHot": lambda: {"indices": np.arange(3), "depth": Const(3), "on_value": Const(1.0), "off_value": Const(0.0)},
    "Xdivy": lambda: {"x": image(), "y": image()},
}
"""Beside those that have a rule for tiles."""


def node_of(run, arrays):
    """The operation in a graph of its own, and the operands that its arguments are."""
    specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
    graph = from_concrete_function(tf.function(run, autograph=False).get_concrete_function(*specs))
    return graph.nodes["the_op"], graph.inputs


def runner(op_type, operands):
    def run(*arrays):
        remaining = iter(arrays)
        leaves = [
            next(remaining) if isinstance(leaf, np.ndarray) else leaf.value if isinstance(leaf, Const) else leaf
            for leaf in tf.nest.flatten(operands)
        ]
        return getattr(tf.raw_ops, op_type)(**tf.nest.pack_sequence_as(operands, leaves), name="the_op")

    return run


def exponents_and_results(op_type, exponent, factor):
    """With each real operand, and with all, times a factor: the exponent by rule, results before and after."""
    operands = (OTHERS.get(op_type) or CASES[op_type])()
    arrays = [leaf for leaf in tf.nest.flatten(operands) if isinstance(leaf, np.ndarray)]
    run = runner(op_type, operands)
    node, arguments = node_of(run, arrays)
    floats = [number for number, array in enumerate(arrays) if array.dtype.kind == "f"]
    for chosen in [*({number} for number in floats), set(floats)]:
        scaled = [array * array.dtype.type(factor) if n in chosen else array for n, array in enumerate(arrays)]
        given = {arguments[number] for number in chosen}
        values = [AbstractValue(exponent=exponent) if t in given else zero_or_any(t) for t in node.inputs]
        outs = [node.out(index) for index in range(len(node.outputs))]
        op = types.SimpleNamespace(node=node, values=values, outs=outs)
        try:
            found = scaling_exponent(op)
        except (MixedScalingError, NonlinearError):
            continue
        results = [[np.asarray(t) for t in tf.nest.flatten(run(*map(tf.constant, d)))] for d in (arrays, scaled)]
        yield found, [pair for pair in zip(*results, strict=True) if pair[0].dtype.kind in "fc"]


def zero_or_any(tensor):
    return AbstractValue(exponent=math.inf) if is_zero(tensor) else AbstractValue()


@pytest.mark.parametrize("op_type", sorted({*CASES, *OTHERS} - set(CLASSIFICATIONS)))
def test_zeros_by_rule_are_zeros(op_type):
    for exponent, results in exponents_and_results(op_type, math.inf, 0):
        assert exponent != math.inf or not any(zeros.any() for _, zeros in results)


@pytest.mark.parametrize("op_type", sorted({*CASES, *OTHERS} - set(CLASSIFICATIONS)))
def test_results_scale_by_their_exponent(op_type):
    for exponent, results in exponents_and_results(op_type, Fraction(1), 2):
        if exponent is None:  # It adds values of different exponents.
            continue
        factor = 1 if exponent == math.inf else 2.0 ** float(exponent)
        for before, after in results:
            np.testing.assert_allclose(after, before * factor, rtol=1e-4, atol=1e-5)


def test_rules_find_zeros_of_gradient_ops():
    for op_type in ("Mul", "Conv2DBackpropInput", "ReluGrad", "AddV2", "MaxPoolGrad", "Sum", "Reshape"):
        *_, (exponent, _) = exponents_and_results(op_type, math.inf, 0)
        assert exponent == math.inf, op_type
