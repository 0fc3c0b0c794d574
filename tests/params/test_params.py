"""Tests of parameter objects: accepted and refused values, immutability."""

import dataclasses
import pickle
import re

import numpy as np
import pytest

import tflms_sft
from tflms_sft import AutoParams, SegmentSpec, SFTParams
from tflms_sft._params.tile_counts import parse_num_tiles

IMAGE, VOLUME, SEQUENCE = ("height", "width"), ("depth", "height", "width"), (None, "length")
SPEC = SegmentSpec("input", "pool", num_tiles=(2, 2))


# Numbers of tiles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names", "batch", "spatial"),
    [
        ((4, 2), IMAGE, 1, (4, 2)),
        ([4, 2], IMAGE, 1, (4, 2)),
        ((3, 4, 2), IMAGE, 3, (4, 2)),
        ((3, 4, 2), VOLUME, 1, (3, 4, 2)),
        ((2, 3, 4, 2), VOLUME, 2, (3, 4, 2)),
        ({"height": 4, "width": 2}, IMAGE, 1, (4, 2)),
        ({"depth": 4, "width": 2}, VOLUME, 1, (4, 1, 2)),
        ({"batch": 2}, IMAGE, 2, (1, 1)),
        ({"width": 5, "batch": 2, "height": 3}, IMAGE, 2, (3, 5)),
        ((1, 1), IMAGE, 1, (1, 1)),
        ((5,), SEQUENCE, 1, (1, 5)),
        ((2, 5), SEQUENCE, 2, (1, 5)),
        ({"length": 5}, SEQUENCE, 1, (1, 5)),
    ],
)
def test_num_tiles_by_position_or_name_make_grid(value, names, batch, spatial):
    grid = parse_num_tiles(value, "num_tiles").grid(names)
    assert (grid.batch, grid.spatial) == (batch, spatial)


@pytest.mark.parametrize(
    ("value", "names", "text"),
    [
        ((2,), IMAGE, "`num_tiles` has 1 count(s), but the tiled tensor has 2 axes. Give (height, width) or (batch,"),
        ((2, 2), VOLUME, "has 3 axes. Give (depth, height, width)"),
        ((1, 2, 3, 4), IMAGE, "has 4 count(s)"),
        ({"depth": 2}, IMAGE, "names ['depth'], but the tiled tensor has the axes batch, height, width"),
        ({"height": 2}, SEQUENCE, "the axes batch, length"),
    ],
)
def test_num_tiles_for_other_axes_are_refused(value, names, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_num_tiles(value, "num_tiles").grid(names)


def test_num_tiles_auto_is_none():
    assert parse_num_tiles("auto", "num_tiles") is None


MAKERS = [
    pytest.param("num_tiles", lambda value: SFTParams(num_tiles=value), id="SFTParams.num_tiles"),
    pytest.param("num_tiles", lambda value: SegmentSpec("a", "b", num_tiles=value), id="SegmentSpec.num_tiles"),
    pytest.param("num_tiles", lambda value: tflms_sft.SFT(value), id="SFT"),
    pytest.param(
        "backward_num_tiles", lambda value: SFTParams(backward_num_tiles=value), id="SFTParams.backward_num_tiles"
    ),
    pytest.param(
        "backward_num_tiles",
        lambda value: SegmentSpec("a", "b", backward_num_tiles=value),
        id="SegmentSpec.backward_num_tiles",
    ),
]


@pytest.mark.parametrize(("argument", "make"), MAKERS)
@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ((0, 2), ValueError, "must be at least 1 along every axis"),
        ((2, -1), ValueError, "must be at least 1 along every axis"),
        ({"height": 0}, ValueError, "must be at least 1 along every axis"),
        ((2.0, 2), TypeError, "must consist of integers"),
        ((2, float("nan")), TypeError, "must consist of integers"),
        ((True, 2), TypeError, "must consist of integers"),
        (("2", "2"), TypeError, "must consist of integers"),
        ((2, None), TypeError, "must consist of integers"),
        ((), ValueError, "has 0 counts"),
        ((1, 2, 3, 4, 5), ValueError, "has 5 counts"),
        ({"rows": 2}, ValueError, "names unknown axes ['rows']"),
        (4, TypeError, 'expected "auto", one count for each axis such as (height, width)'),
        (True, TypeError, 'expected "auto", one count for each axis such as (height, width)'),
        ("many", TypeError, 'expected "auto", one count for each axis such as (height, width)'),
        ({}, ValueError, "names no axis"),
        (np.array([2, 2]), TypeError, 'expected "auto", one count for each axis such as (height, width)'),
    ],
    ids=repr,
)
def test_num_tiles_invalid_value_is_refused(argument, make, value, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as error:
        make(value)
    assert f"`{argument}`" in str(error.value)
    assert f"Received: {argument}={value!r}" in str(error.value)


def test_num_tiles_none_is_accepted_in_segment_spec_only():
    assert SegmentSpec("a", "b", num_tiles=None).num_tiles is None
    with pytest.raises(TypeError, match="num_tiles=None"):
        SFTParams(num_tiles=None)


# Names -----------------------------------------------------------------------------------------------------------


def test_segment_spec_names_become_tuples():
    spec = SegmentSpec("a", ("b", "c"))
    assert spec.entries == ("a",)
    assert spec.exits == ("b", "c")


@pytest.mark.parametrize("value", ["", (), None, 3, ("a", 3), ("a", ""), {"a"}], ids=repr)
@pytest.mark.parametrize("argument", ["entry", "exit"])
def test_segment_spec_invalid_names_are_refused(argument, value):
    with pytest.raises(TypeError, match=f"`{argument}` must be the name of a layer, op or tensor") as error:
        SegmentSpec(**{"entry": "a", "exit": "b", argument: value})
    assert f"Received: {argument}={value!r}" in str(error.value)


# The rest of SFTParams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["keep", "", None, 1])
def test_halo_unknown_value_is_refused(value):
    with pytest.raises(ValueError, match=f'`halo` must be "recompute".*"carry".*halo={value!r}'):
        SFTParams(halo=value)
    if value is not None:  # None takes that of SFTParams.
        with pytest.raises(ValueError, match=f'`halo` must be "recompute".*"carry".*halo={value!r}'):
            SegmentSpec("a", "b", halo=value)


def test_sft_params_segments_become_tuple():
    assert SFTParams(segments=[SPEC]).segments == (SPEC,)
    assert SFTParams().segments == "auto"


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("all", ValueError, '`segments` must be "auto" or a list of `SegmentSpec`'),
        (None, TypeError, '`segments` must be "auto" or a list of `SegmentSpec`'),
        (SPEC, TypeError, '`segments` must be "auto" or a list of `SegmentSpec`'),
        ([("a", "b")], TypeError, '`segments` must be "auto" or a list of `SegmentSpec`'),
        ([SPEC, "auto"], TypeError, '`segments` must be "auto" or a list of `SegmentSpec`'),
        ([], ValueError, "`segments` must name at least one segment"),
    ],
    ids=repr,
)
def test_sft_params_invalid_segments_are_refused(value, kind, text):
    with pytest.raises(kind, match=text) as error:
        SFTParams(segments=value)
    assert repr(value) in str(error.value)


def test_sft_params_memory_capacity_is_parsed():
    assert SFTParams(memory_capacity="1KiB").memory_capacity == 1024
    assert SFTParams(memory_capacity=7).memory_capacity == 7


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, ValueError),
        (-5, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (float("nan"), TypeError),
        ("1", ValueError),
        ("1 PiB", ValueError),
    ],
)
def test_invalid_bytes_are_refused_with_argument_name(value, kind):
    for make, argument in (
        (lambda: SFTParams(memory_capacity=value), "memory_capacity"),
        (lambda: AutoParams(value), "memory_budget"),
        (lambda: tflms_sft.MemoryBudget(value), "memory_budget"),
    ):
        with pytest.raises(kind, match=f"`{argument}` must be .*Received: {argument}={value!r}"):
            make()


def test_auto_params_budget_none_is_refused():
    with pytest.raises(TypeError, match="`memory_budget` must be a whole number of bytes"):
        AutoParams(None)


@pytest.mark.parametrize("value", [0, 0.0, 0.1, 0.999])
def test_headroom_from_zero_to_below_one_is_accepted(value):
    assert AutoParams("1GiB", value).headroom == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, ValueError),
        (-0.1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (True, TypeError),
        ("10%", TypeError),
        (None, TypeError),
    ],
)
def test_headroom_out_of_range_is_refused(value, kind):
    for make in (lambda: AutoParams("1GiB", value), lambda: tflms_sft.MemoryBudget("1GiB", headroom=value)):
        with pytest.raises(kind, match=f"`headroom` must be a number from 0 to below 1. Received: headroom={value!r}"):
            make()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((4, 32), ValueError),
        ((4, 2, 8, 8, 8, 3), ValueError),
        ((0, 32, 32, 3), ValueError),
        ((4, -1, 32, 3), ValueError),
        ((None, 32, 32, 3), TypeError),
        ((4, 32, 32.0, 3), TypeError),
        ((True, 32, 32, 3), TypeError),
        ("4x32x32x3", TypeError),
        (4, TypeError),
    ],
    ids=repr,
)
def test_checked_shape_accepts_three_to_five_positive_integers(value, kind):
    for make in (lambda: tflms_sft.SFT(batch_shape=value), lambda: tflms_sft.MemoryBudget("1GiB", batch_shape=value)):
        with pytest.raises(kind, match=r"`batch_shape` must be \(batch, height, width, channels\)") as error:
            make()
        assert f"batch_shape={value!r}" in str(error.value)


# Plain values --------------------------------------------------------------------------------------------------------

VALUES = [SPEC, SFTParams(segments=[SPEC]), SFTParams(num_tiles={"height": 2}), AutoParams("8GiB")]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_params_are_frozen_and_picklable(value):
    field = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, "other")
    assert pickle.loads(pickle.dumps(value)) == value


def test_params_replace_checks_again():
    assert dataclasses.replace(AutoParams("8GiB"), headroom=0.2).headroom == 0.2
    with pytest.raises(ValueError, match="headroom"):
        dataclasses.replace(AutoParams("8GiB"), headroom=2)
