"""The coverage page: every Keras layer is examined or listed, and the page says what was found."""

import inspect
import json
import re

import keras
import pytest

from benchmarks import _child, _coverage_layers, coverage

RESULTS = json.loads((_child.ROOT / "benchmarks" / "results" / "coverage.json").read_text())


def layer_names():
    """Without the other names that some have."""
    found = inspect.getmembers(keras.layers, inspect.isclass)
    return {name for name, member in found if issubclass(member, keras.layers.Layer) and member.__name__ == name}


def test_keras_layers_are_all_examined_or_listed():
    listed = {name for names in _coverage_layers.NOT_FOR_IMAGES.values() for name in names.split()}
    examined = set(_coverage_layers.uses())
    assert not listed & examined
    assert not layer_names() - listed - examined
    assert set(RESULTS["layers"]) == examined


def test_coverage_page_equals_its_results():
    page = (_child.ROOT / "docs" / "reference" / "supported.md").read_text()
    layers = [line for name in sorted(RESULTS["layers"]) for line in RESULTS["layers"][name]]
    networks = [RESULTS["networks"][name] for name in coverage.NETWORKS]
    assert len(layers) > 100
    versions = dict(zip(("keras", "tensorflow"), re.findall(r"(?:Keras|TensorFlow) ([\d.]+\d)", page), strict=True))
    assert page == coverage.page(networks, layers, versions)


def test_coverage_page_shows_every_layer_and_network():
    page = " ".join((_child.ROOT / "docs" / "reference" / "supported.md").read_text().split())
    assert not [name for name in (*RESULTS["layers"], *RESULTS["networks"]) if f"`{name}`" not in page]
    uses = [use for lines in RESULTS["layers"].values() for title, *_ in lines for use in title.split(", ")[1:]]
    assert not [use for use in uses if use.removesuffix(" (1-D)") not in page]


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        ({"reasons": [], "loops": 2, "segments": 1}, "tiled"),
        ({"reasons": [], "loops": 7, "segments": 1}, "tiled, with a barrier (7 loops)"),
        ({"reasons": ["Mean: ... everything after it waits ..."], "loops": 2, "segments": 1}, "ends a segment"),
        (
            {"reasons": ["Foo: no", "Mean: everything after it waits"], "loops": 2, "segments": 1},
            "not rewritten: Foo: no",
        ),
        ({"reasons": ["the backward pass reads no tensor inside of it"], "loops": 2, "segments": 1}, "tiled"),
        ({"reasons": ["the backward pass reads no tensor inside of it"], "loops": 0, "segments": 0}, "not rewritten"),
    ],
)
def test_outcome_is_described(found, outcome):
    assert coverage.outcome_of(found).startswith(outcome)


def test_layer_examined_in_a_child_process_gives_its_outcome():
    ((title, outcome, difference),) = coverage.layer_rows("AdditiveAttention")
    assert title.startswith("`AdditiveAttention`") and outcome.startswith("tiled, with a barrier")
    assert float(difference) < 1e-12
