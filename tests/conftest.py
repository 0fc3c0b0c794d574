import gc
import os
import pathlib

# TensorFlow reads both when it is imported. oneDNN reorders sums, and on some CPUs it corrupts the heap in
# plain Keras (a 1x1 convolution of stride 2).
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Plans go by how fast the machine is: by that of no machine in particular.
os.environ.setdefault("TFLMS_SFT_RATES", "nominal")

import keras
import pytest
import tensorflow as tf
from long_tests import mark_long

from rewriters.device import kernel_scratch
from tflms_sft._util import progress

# On a busy machine the line for those who wait would be among the lines that tests compare.
progress.SLOW_SECONDS = 600.0

# Gradients of convolutions reserve memory by the size of a cache: more than all of the small networks here take.
CACHES = kernel_scratch.L3_BYTES, kernel_scratch.last_level_cache
kernel_scratch.L3_BYTES, kernel_scratch.last_level_cache = 0, lambda: 0

# TF32 keeps 10 bits of the mantissa: too few to compare numbers by.
tf.config.experimental.enable_tensor_float_32_execution(False)


LONG = pathlib.Path(__file__).resolve().with_name("long.txt")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, items):
    """Before slow ones are left out."""
    mark_long(session, items, LONG)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not tf.config.list_physical_devices("GPU"):
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def fresh_keras():
    """Every test starts with the same names, float type and seeds, and leaves no graph behind."""
    _reset()
    yield
    _reset()


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Looking for garbage in all that was there before a module takes a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()


def _reset():
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)
