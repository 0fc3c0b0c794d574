"""How long the rewriting itself takes: ResNet-50's full Keras/Adam training step.

    python -m benchmarks.compile_time [--runs 3]

Prints the median time to trace the step, and of what comes on top: reading and analysing the graph, planning
automatic segments, emitting the loops and importing the result. The process is warm: one round is not counted.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import keras
import tensorflow as tf

import tflms_sft


def one_round(model: keras.Model, size: int) -> tuple[float, float, int]:
    """(seconds to trace, seconds to rewrite on top, number of ops traced)."""
    specs = (tf.TensorSpec((None, size, size, 3), tf.float32), tf.TensorSpec((None,), tf.int32))
    begin = time.perf_counter()
    traced = tf.function(model.train_step).get_concrete_function(specs)
    middle = time.perf_counter()
    tflms_sft.rewrite(traced, tflms_sft.SFTParams(num_tiles=(2, 2)))
    return middle - begin, time.perf_counter() - middle, len(traced.graph.get_operations())


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    shape = (options.image_size, options.image_size, 3)
    model = keras.applications.ResNet50(weights=None, input_shape=shape, classes=10)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    rounds = [one_round(model, options.image_size) for _ in range(options.runs + 1)][1:]
    print(f"{platform.processor() or platform.machine()}, TensorFlow {tf.__version__}, Keras {keras.__version__}")
    print(f"ResNet-50, Adam, {options.image_size} px, {rounds[0][2]} ops, median of {options.runs}:")
    print(f"  trace   {statistics.median(r[0] for r in rounds):6.2f} s")
    print(f"  rewrite {statistics.median(r[1] for r in rounds):6.2f} s on top")


if __name__ == "__main__":
    main()
