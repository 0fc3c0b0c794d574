"""Duration of rewriting ResNet-50's full Keras/Adam training step.

    python -m benchmarks.compile_time [--runs 3]

Prints the median time to trace the step, and of what comes on top: reading and analysing the graph, planning
automatic segments, emitting the loops and importing the result. The process is warm: one round is not counted.
With trainable BatchNorm the graph is largest and falls into the most segments.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import keras
import tensorflow as tf

import tflms_sft


def one_round(model: keras.Model, size: int) -> tuple[float, float, int, int]:
    """(seconds to trace, seconds to rewrite on top, number of ops traced, number of segments)."""
    specs = (tf.TensorSpec((None, size, size, 3), tf.float32), tf.TensorSpec((None,), tf.int32))
    begin = time.perf_counter()
    traced = tf.function(model.train_step).get_concrete_function(specs)
    middle = time.perf_counter()
    step = tflms_sft.rewrite(traced, tflms_sft.SFTParams(num_tiles=(2, 2)))
    end = time.perf_counter()
    return middle - begin, end - middle, len(traced.graph.get_operations()), len(step.plan.segments)


def resnet(size: int, trainable: bool) -> keras.Model:
    """ResNet-50 with Adam, ready to train."""
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = trainable
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, TensorFlow {tf.__version__}, Keras {keras.__version__}")
    print(f"ResNet-50, Adam, {options.image_size} px, median of {options.runs}:\n")
    print("| BatchNorm | ops traced | segments | trace  | rewrite, on top |")
    print("|-----------|------------|----------|--------|-----------------|")
    for trainable in (True, False):
        keras.backend.clear_session()
        model = resnet(options.image_size, trainable)
        rounds = [one_round(model, options.image_size) for _ in range(options.runs + 1)][1:]
        trace, top = (statistics.median(r[n] for r in rounds) for n in (0, 1))
        ops, segments = rounds[0][2:]
        mode = "trainable" if trainable else "frozen"
        print(f"| {mode:9} | {ops:10} | {segments:8} | {trace:4.2f} s | {top:13.2f} s |", flush=True)


if __name__ == "__main__":
    main()
