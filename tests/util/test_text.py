"""Lists of names in errors and reports."""

import pytest

from tflms_sft._util.text import nearest, shortened, table


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, and resetting it takes longer than the tests."""


@pytest.mark.parametrize(
    ("names", "text"),
    [([], ""), (["a", "b"], "a, b"), (list("abc"), "a, b and 1 more"), (list("abcde"), "a, b and 3 more")],
)
def test_a_list_is_cut_short_and_says_by_how_much(names, text):
    assert shortened(names, 2) == text


def test_the_nearest_names_are_offered_or_some_names_at_all():
    known = ["block1/conv", "block1/pool", "one", "two", "three", "four"]
    assert nearest("block1/cnv", known).startswith("Nearest: 'block1/conv'")
    assert nearest("zzz", known) == "Nearest: 'block1/conv', 'block1/pool', 'one', 'two'."


def test_what_is_less_likely_is_offered_only_where_nothing_else_is_like_the_name():
    layers, operations = ["conv1", "pool"], ["conv1_kernel", "pool_x", "Reshape"]
    assert nearest("conv1_kernels", layers, operations) == "Nearest: 'conv1'.", "though an operation is nearer"
    assert nearest("Reshape_1", layers, operations) == "Nearest: 'Reshape'."
    assert nearest("zzz", layers, operations) == "Nearest: 'conv1', 'pool'."
    assert nearest("zzz", [], operations).startswith("Nearest: 'conv1_kernel', ")


def test_a_table_has_even_columns():
    assert table([("name", "size"), ("a", "12"), ("longer", "3")], right=(1,)) == [
        "  name    size",
        "  ------  ----",
        "  a         12",
        "  longer     3",
    ]
