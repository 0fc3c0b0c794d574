"""The table of facts about op types: true to TensorFlow, consistent with the rules, and the only one of its kind."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorflow.python.framework import op_def_registry

from rewriters.ir import op_traits
from rewriters.ir.op_traits import OP_TRAITS, Trait, has_own_leading_size, is_random, ops_with, traits_of
from rewriters.rules import catalogue
from rewriters.rules.elementwise import Additive, LinearIn, Pointwise
from rewriters.rules.registry import registered

_ = catalogue  # Importing it fills the registry.

ROOT = Path(__file__).parents[2]

DISPATCH = {
    ("rewriters.ir.loop_bodies", "_ARITHMETIC"),
    ("rewriters.ir.loop_bodies", "_COUNTS"),
    ("rewriters.ir.static_values", "_HANDLERS"),
    ("rewriters.ir.symbolic_dims", "_KEEPS"),
    ("rewriters.canonicalize.matrices_to_images", "_REPLACEMENTS"),
    ("rewriters.canonicalize.window_ops", "HANDLERS"),
}
"""Tables that map op types to functions beside them."""

WITHOUT_THE_TRAIT = {
    "Select": "the condition may be a vector with one entry per sample, which is not broadcast",
    "BiasAdd": "the bias is broadcast along the channels, wherever these are",
    "ConcatV2": "entries of the result come from different operands",
    "LogSoftmax": "combines entries along the channels",
    "Softmax": "combines entries along the channels",
    "SoftmaxCrossEntropyWithLogits": "reduces over the channels",
    "SparseSoftmaxCrossEntropyWithLogits": "reduces over the channels",
    "InTopKV2": "reduces over the channels",
    "ZerosLike": "reads the shape of its operand alone",
}
"""Op types with a rule derived from `Pointwise` that are not elementwise, and why."""


def is_op(word: str) -> bool:
    return word.isidentifier() and word[0].isupper() and op_def_registry.get(word) is not None


def tables_of_ops(source: str) -> Iterator[tuple[str, int]]:
    """Yield name and line of each module-level assignment with two or more op names in its value."""
    for statement in ast.parse(source).body:
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            continue
        texts = [c.value for c in ast.walk(statement.value) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        if sum(is_op(word) for text in texts for word in text.split()) >= 2:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            yield ast.unparse(target), statement.lineno


def test_op_traits_table_holds_registered_ops_only():
    assert [op_type for op_type in OP_TRAITS if op_def_registry.get(op_type) is None] == []
    forward_ops = {traits.gradient_of for traits in OP_TRAITS.values()} - {None}
    assert [op_type for op_type in forward_ops if op_def_registry.get(op_type) is None] == []


def test_op_traits_has_one_row_for_each_op_type():
    assert len(OP_TRAITS) == sum(len(op_types.split()) for op_types, _ in op_traits._ROWS)


def test_op_traits_operand_positions_exist():
    for op_type, traits in OP_TRAITS.items():
        number = len(op_def_registry.get(op_type).input_arg)
        positions = [*traits.linear_in, *([] if traits.shape_operand is None else [traits.shape_operand])]
        assert all(position < number for position in positions), op_type


def test_op_traits_every_trait_is_used():
    assert [trait.name for trait in Trait if not ops_with(trait)] == []


def test_modules_outside_of_op_traits_and_rules_have_no_table_of_op_names():
    tables = []
    for path in sorted(path for top in ("rewriters", "tflms_sft") for path in (ROOT / top).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module == "rewriters.ir.op_traits" or module.startswith(("rewriters.rules.", "rewriters.batch_semantics.")):
            continue
        tables += [(module, name) for name, _ in tables_of_ops(path.read_text()) if (module, name) not in DISPATCH]
    assert tables == []


@pytest.mark.parametrize(
    "source",
    [
        'OPS = ("Add", "AddN")',
        'OPS = frozenset("Add AddN".split())',
        'OPS: dict[str, int] = {"Fill": 1, **dict.fromkeys(("Tile", "Slice"), 2)}',
    ],
)
def test_tables_of_ops_finds_each_form(source):
    assert [name for name, _ in tables_of_ops(source)] == ["OPS"]


def test_tables_of_ops_ignores_single_names_and_words():
    assert list(tables_of_ops('OP = "Add"\nTEXT = "Add a note"\nNAMES = ("add", "sum")')) == []


def test_elementwise_rules_have_the_trait_or_a_reason():
    pointwise = {op_type for op_type, rule in registered().items() if isinstance(rule, Pointwise)}
    assert pointwise - ops_with(Trait.ELEMENTWISE) == set(WITHOUT_THE_TRAIT)
    assert ops_with(Trait.ELEMENTWISE) <= pointwise


def test_linear_and_additive_rules_agree_with_traits():
    for op_type, rule in registered().items():
        assert isinstance(rule, Additive) == (op_type in ops_with(Trait.ADDITIVE)), op_type
        if type(rule) is LinearIn:
            assert rule.positions == traits_of(op_type).linear_in


def test_traits_that_imply_each_other():
    assert ops_with(Trait.SUM) <= ops_with(Trait.ADDITIVE) <= ops_with(Trait.ELEMENTWISE)
    assert ops_with(Trait.SHRINKABLE) <= ops_with(Trait.ELEMENTWISE)
    assert ops_with(Trait.FUSED_PADDING) <= ops_with(Trait.PADDING)
    assert ops_with(Trait.IN_PLACE).isdisjoint(ops_with(Trait.FORWARDS_BUFFER))
    assert ops_with(Trait.LOOP).isdisjoint(ops_with(Trait.CONDITIONAL) | ops_with(Trait.CALL))


def test_ops_with_combined_traits_has_all_of_them():
    assert ops_with(Trait.CONVOLUTION | Trait.VOLUMETRIC) == {"Conv3D"}


def test_op_families_go_by_parts_of_names():
    assert is_random("StatelessRandomUniformV2") and not is_random("Relu")
    assert has_own_leading_size("ResourceGather") and has_own_leading_size("Where") and not has_own_leading_size("Add")
    assert traits_of("NoSuchOp").flags == Trait(0)
