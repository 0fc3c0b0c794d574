import contextlib
import functools
import gc
import os
import pathlib

# TensorFlow reads both variables at its import. oneDNN reorders sums, and on some CPUs it corrupts the heap in
# plain Keras (a 1x1 convolution of stride 2).
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Plans depend on the rates of the machine: nominal rates make them equal everywhere.
os.environ.setdefault("TFLMS_SFT_RATES", "nominal")
os.environ.setdefault("TFLMS_SFT_PLAN_CACHE", "off")

import keras
import pytest
import tensorflow as tf
from devices import NO_CACHES, planning_with
from long_tests import mark_long

from rewriters.emission import file_buffers
from rewriters.ir import graph_pass
from tflms_sft._util import progress

# Traces make many objects that stay.
gc.set_threshold(20_000, 20, 20)

# On a busy machine a progress line would appear among the lines that tests compare.
progress.SLOW_SECONDS = 600.0

# Checks of passes that are too slow for users: that no pass edits its input, and the order of stateful ops.
graph_pass.FULL_CHECKS = True

# The mantissa of TF32 has 10 bits, too few for comparisons.
tf.config.experimental.enable_tensor_float_32_execution(False)

pytest_plugins = ["command_line", "rates"]

LONG = pathlib.Path(__file__).resolve().with_name("long.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, items):
    """Mark long tests before the selection leaves out those marked `slow`."""
    mark_long(session, items, LONG)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not tf.config.list_physical_devices("GPU"):
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True, scope="session")
def no_caches():
    """Plan for a device whose kernels take little scratch memory.

    Scratch memory of convolution gradients is as large as a cache, 30 MiB: about one test in twenty has a network so
    small that neither tiles nor swaps could then lower its peak.
    """
    with planning_with(**NO_CACHES):
        yield


@pytest.fixture(scope="module")
def cached_plans(tmp_path_factory):
    """Search the plan of a step and a budget once in a module: for tests of what follows the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFLMS_SFT_PLAN_CACHE", str(tmp_path_factory.mktemp("plans")))
        yield


@pytest.fixture
def plan_with():
    """Return a function that replaces facts of the planned device until the test ends, as `planning_with` does."""
    with contextlib.ExitStack() as stack:
        yield lambda **facts: stack.enter_context(planning_with(**facts))


@pytest.fixture
def set_min_file_bytes(monkeypatch):
    """Return a function that sets the bytes from which on results of loops may lie in files."""
    return functools.partial(monkeypatch.setattr, file_buffers, "MIN_FILE_BYTES")


@pytest.fixture(autouse=True)
def fresh_keras():
    """Reset names, float type, seeds and graphs before and after each test."""
    _reset()
    yield
    _reset()


@pytest.fixture
def double_precision(fresh_keras):
    keras.config.set_floatx("float64")


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Exclude older objects from garbage collection, which would take a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()


def _reset():
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)
