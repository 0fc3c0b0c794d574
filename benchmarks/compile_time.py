"""Duration of rewriting a Keras training step of ResNet-50 with Adam.

    python -m benchmarks.compile_time [--runs 3]

Prints the median times to trace the step and to rewrite it: read and analyse the graph, plan automatic segments, emit
loops, and import the result. A first round is not counted. Trainable BatchNorm leads to the most ops and segments.
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
    """Return the seconds to trace, the seconds to rewrite, the number of traced ops, and the number of segments."""
    specs = (tf.TensorSpec((None, size, size, 3), tf.float32), tf.TensorSpec((None,), tf.int32))
    begin = time.perf_counter()
    traced = tf.function(model.train_step).get_concrete_function(specs)
    middle = time.perf_counter()
    step = tflms_sft.rewrite(traced, tflms_sft.SFTParams(num_tiles=(2, 2)))
    end = time.perf_counter()
    return middle - begin, end - middle, len(traced.graph.get_operations()), len(step.plan.segments)


def resnet(size: int, trainable: bool) -> keras.Model:
    """Build and compile ResNet-50 with Adam."""
    model = keras.applications.ResNet50(weights=None, input_shape=(size, size, 3), classes=10)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = trainable
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def main() -> None:
    """Measure and print."""
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
        trace, rewriting = (statistics.median(r[n] for r in rounds) for n in (0, 1))
        ops, segments = rounds[0][2:]
        mode = "trainable" if trainable else "frozen"
        print(f"| {mode:9} | {ops:10} | {segments:8} | {trace:4.2f} s | {rewriting:13.2f} s |", flush=True)


if __name__ == "__main__":
    main()
