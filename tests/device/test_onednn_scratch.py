"""Scratch memory of oneDNN's kernels: the model against the resident memory of a process."""

import numpy as np
import pytest
from children import printed


@pytest.fixture(scope="module")
def scratch():
    return printed("filter_copies.py")


@pytest.mark.parametrize("op", ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"])
def test_convolution_with_onednn_copies_a_filter_once(scratch, op):
    measured, modelled = scratch[op]
    assert modelled == 4 * 7**2 * 512**2
    assert np.isclose(measured, modelled, rtol=0.1)
