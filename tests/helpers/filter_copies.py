"""Memory that convolutions and their gradients take with oneDNN beyond their results; for `test_onednn_scratch.py`."""

import os
import re
from pathlib import Path

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf
from children import say

from rewriters.device.kernel_scratch import op_scratch
from rewriters.ir.device_detection import planned_device
from rewriters.ir.graph_reader import from_concrete_function

TAPS, CHANNELS, PIXELS, IMAGES = 7, 512, 9, 2


def status(field):
    """Return a size of this process in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1))


def growth(function):
    """Return the bytes by which the process, and the allocator's own count, grow while a function runs.

    A first call has left room for the result in the memory that the allocator keeps.
    """
    function()
    tf.config.experimental.reset_memory_stats("CPU:0")
    Path("/proc/self/clear_refs").write_text("5")  # Resets the highest resident size.
    resident, counted = status("VmRSS"), tf.config.experimental.get_memory_info("CPU:0")["current"]
    result = function()
    del result
    return status("VmHWM") - resident, tf.config.experimental.get_memory_info("CPU:0")["peak"] - counted


def main():
    image, gradient = (tf.random.normal((IMAGES, PIXELS, PIXELS, CHANNELS)) for _ in range(2))
    weights = tf.random.normal((TAPS, TAPS, CHANNELS, CHANNELS))
    geometry = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    steps = {
        "Conv2D": lambda image, weights, _: tf.nn.conv2d(image, weights, 1, "SAME"),
        "Conv2DBackpropInput": lambda image, weights, gradient: tf.raw_ops.Conv2DBackpropInput(
            input_sizes=image.shape, filter=weights, out_backprop=gradient, **geometry
        ),
        "Conv2DBackpropFilter": lambda image, weights, gradient: tf.raw_ops.Conv2DBackpropFilter(
            input=image, filter_sizes=weights.shape, out_backprop=gradient, **geometry
        ),
    }
    for op, step in steps.items():
        concrete = tf.function(step).get_concrete_function(image, weights, gradient)
        (node,) = [node for node in from_concrete_function(concrete).nodes.values() if node.op == op]
        resident, counted = growth(lambda concrete=concrete: concrete(image, weights, gradient))
        say(op, [resident, counted, op_scratch(node, IMAGES, planned_device())])


if __name__ == "__main__":
    main()
