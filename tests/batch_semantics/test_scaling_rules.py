"""What is said to be all zeros is: each operation is run with operands of zeros."""

import types

import numpy as np
import pytest
import tensorflow as tf
from one_op import Const, image
from rule_cases import CASES

from rewriters.batch_semantics.domain import AbstractValue
from rewriters.batch_semantics.scaling_rules import is_structurally_zero
from rewriters.ir.graph import from_concrete_function
from rewriters.rules.contraction import CROSS_ENTROPIES
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


def answers(op_type):
    """With each operand zero, and with all: whether the result is said to be, and what comes out."""
    operands = (OTHERS.get(op_type) or CASES[op_type])()
    arrays = [leaf for leaf in tf.nest.flatten(operands) if isinstance(leaf, np.ndarray)]
    run = runner(op_type, operands)
    node, arguments = node_of(run, arrays)
    floats = [number for number, array in enumerate(arrays) if array.dtype.kind == "f"]
    for chosen in [*({number} for number in floats), set(floats)]:
        zeros = [np.zeros_like(array) if number in chosen else array for number, array in enumerate(arrays)]
        given = {arguments[number] for number in chosen}
        values = [AbstractValue(is_zero=t in given or is_zero(t)) for t in node.inputs]
        told = is_structurally_zero(types.SimpleNamespace(node=node, values=values))
        yield told, [np.asarray(t) for t in tf.nest.flatten(run(*map(tf.constant, zeros)))]


@pytest.mark.parametrize("op_type", sorted({*CASES, *OTHERS} - set(CROSS_ENTROPIES)))
def test_is_structurally_zero_implies_zero_results(op_type):
    for told, results in answers(op_type):
        rounded = [result for result in results if result.dtype.kind in "fc"]
        assert not told or not any(result.any() for result in rounded)


def test_is_structurally_zero_holds_for_gradient_ops():
    for op_type in ("Mul", "Conv2DBackpropInput", "ReluGrad", "AddV2", "MaxPoolGrad", "Sum", "Reshape", "TopKV2"):
        *_, (told, _) = answers(op_type)
        assert told, op_type
