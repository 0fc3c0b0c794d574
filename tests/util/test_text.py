"""Lists of names in errors and reports."""

import pytest

from tflms_sft._util.text import nearest, shortened, table


@pytest.mark.parametrize(
    ("names", "text"),
    [([], ""), (["a", "b"], "a, b"), (list("abc"), "a, b and 1 more"), (list("abcde"), "a, b and 3 more")],
)
def test_shortened_list_counts_omitted_names(names, text):
    assert shortened(names, 2) == text


def test_nearest_returns_similar_or_first_names():
    known = ["block1/conv", "block1/pool", "one", "two", "three", "four"]
    assert nearest("block1/cnv", known).startswith("Nearest: 'block1/conv'")
    assert nearest("zzz", known) == "Nearest: 'block1/conv', 'block1/pool', 'one', 'two'."


def test_nearest_uses_otherwise_only_without_similar_name():
    layers, operations = ["conv1", "pool"], ["conv1_kernel", "pool_x", "Reshape"]
    assert nearest("conv1_kernels", layers, operations) == "Nearest: 'conv1'.", "though an operation is nearer"
    assert nearest("Reshape_1", layers, operations) == "Nearest: 'Reshape'."
    assert nearest("zzz", layers, operations) == "Nearest: 'conv1', 'pool'."
    assert nearest("zzz", [], operations).startswith("Nearest: 'conv1_kernel', ")


def test_table_aligns_columns():
    assert table([("name", "size"), ("a", "12"), ("longer", "3")], right=(1,)) == [
        "  name    size",
        "  ------  ----",
        "  a         12",
        "  longer     3",
    ]
