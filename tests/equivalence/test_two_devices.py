"""The host tier where there is another device: two logical CPUs, which have to be made before TensorFlow begins."""

import os
import subprocess
import sys
import textwrap

import pytest

HEAD = """
    import re
    import keras, numpy as np, tensorflow as tf
    cpu, = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import tflms_sft
    from rewriters.ir import tf_internals
    ACCELERATOR = "/job:localhost/replica:0/task:0/device:CPU:1"
"""

SMALL = """
    rng = np.random.default_rng(0)
    shapes = [(3, 3, 3, 8)] + [(3, 3, 8, 8)] * 4
    with tf.device("CPU:1"):
        weights = [tf.Variable(0.3 * rng.normal(size=shape)) for shape in shapes]

    @tf.function
    def step(x):
        with tf.device("/device:CPU:1"):
            with tf.GradientTape() as tape:
                y = x
                for weight in weights:
                    y = tf.nn.relu(tf.nn.conv2d(y, weight, 1, "SAME"))
                loss = tf.reduce_sum(y**2)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients):
                weight.assign_sub(1e-6 * gradient)
        return loss, gradients

    x = tf.constant(rng.normal(size=(2, 64, 64, 3)))
    fast = tflms_sft.rewrite(step, tflms_sft.LMSParams(tier="host", min_bytes=0), x)
    start = [weight.numpy() for weight in weights]
    states = []
    for function in (step, fast):
        for weight, value in zip(weights, start):
            weight.assign(value)
        results = [np.array(v) for _ in range(4) for v in tf.nest.flatten(function(x))]
        states.append(results + [weight.numpy() for weight in weights])
    print(all(np.array_equal(a, b) for a, b in zip(*states)))

    # Where and when everything ran.
    ran = {}
    for device in tf_internals.step_stats(fast.concrete_function, [x]).dev_stats:
        for node in device.node_stats:
            begin = node.all_start_nanos + node.op_start_rel_nanos
            ran[node.node_name] = device.device, begin, node.all_start_nanos + node.op_end_rel_nanos
    swaps = {name for name in ran if re.search(r"^lms/.*/swap_(out|in_\\d+)$", name)}  # Not the copies at the border.
    print(len(swaps), all(ran[name][0].endswith("CPU:0") for name in swaps))
    # Exact names: copies at the border are called after what they copy.
    made = {o.name for o in fast.concrete_function.graph.get_operations() if o.type.startswith("Conv2D")}
    convolutions = [name for name in ran if name in made]
    print(len(convolutions), all(ran[name][0] == ACCELERATOR for name in convolutions))
    graph = fast.concrete_function.graph
    checked = late = 0
    for operation in graph.get_operations():
        for control in operation.control_inputs if re.search("/swap_in_\\d+$", operation.name) else ():
            if operation.name in ran and control.name in ran:
                checked += 1
                late += ran[operation.name][1] >= ran[control.name][2]
    print(checked, late)
"""

TRANSFERS = """
    from devices import planning_with
    from tflms_sft._machine import rate_benchmarks
    with planning_with(name="CPU:1"):
        print(rate_benchmarks._host())
        copy = rate_benchmarks.out_and_back(2**26)
    on_host, on_device = sorted(copy.get_concrete_function().graph.variables, key=lambda variable: variable.device)
    on_host.assign(tf.zeros_like(on_host))
    copy()
    for variable in (on_host, on_device):
        print(variable.device[-5:], variable.shape.num_elements() * 4, tf.reduce_min(variable).numpy())
"""

RESNET = """
    model = keras.applications.ResNet50(weights=None, input_shape=(768, 768, 3), classes=10)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)))
    specs = tf.TensorSpec((2, 768, 768, 3)), tf.TensorSpec((2,))
    params = tflms_sft.LMSParams(tier="host", ctrld_strategy="direct_order", fuse_swapins=True, max_in_flight=1)
    plan = tflms_sft.rewrite(step, params, *specs).plan
    print(plan.swap_tier, plan.original.peak_bytes / plan.predicted.peak_bytes)
"""


def lines_of(script):
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_two_device_step_has_structure_results_and_times():
    same, placed, computed, times = lines_of(SMALL)
    assert same == ["True"]
    assert int(placed[0]) >= 4 and placed[1] == "True"
    assert int(computed[0]) >= 10 and computed[1] == "True"
    assert int(times[0]) >= 3 and times[1] == times[0], "each starts after its control operation"


def test_two_device_transfer_rate_is_of_a_copy_to_the_host_and_back():
    (rate,), on_host, on_device = lines_of(TRANSFERS)
    assert float(rate) > 1e8
    assert on_host == ["CPU:0", str(2**26), "1.0"] and on_device == ["CPU:1", str(2**26), "1.0"]


@pytest.mark.slow
def test_two_device_predicted_peak_is_a_third():
    ((tier, ratio),) = lines_of(RESNET)
    assert tier == "host" and float(ratio) >= 3
