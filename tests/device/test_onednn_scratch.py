"""Scratch memory of oneDNN's kernels: the model against the resident memory of a process."""

import os

import numpy as np
import pytest
from children import printed

FILTER_BYTES = 4 * 7**2 * 512**2

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system cannot reset the highest resident size"
)


@pytest.fixture(scope="module")
def scratch():
    return printed("filter_copies.py")


@pytest.mark.parametrize("op", ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"])
def test_convolution_with_onednn_copies_a_filter_once(scratch, op):
    resident, counted, modelled = scratch[op]
    assert modelled == FILTER_BYTES
    assert np.isclose(resident, modelled, rtol=0.1)
    result = FILTER_BYTES if op == "Conv2DBackpropFilter" else 0  # Images are small; a chunk may be larger by a third.
    assert counted <= 1.5 * result + 0.1 * FILTER_BYTES, "the allocator counts results alone"
