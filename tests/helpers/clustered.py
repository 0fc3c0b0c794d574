"""A program that trains with stages on several machines, for `test_cluster.py`; a helper, no test.

It prints a line of JSON for each thing that it found.
"""

import os
import sys

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf
from children import say
from pipelined import CUTS, OPEN, batches, compiled, largest_error, net, run, train_step, variables

import tflms_sft

EPOCHS, KILLED_IN = 4, 2


def spread(devices):
    """A device for each of the four stages."""
    return [devices[number * len(devices) // 4] for number in range(4)]


def refusal(function):
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def equal(devices):
    """A step rewritten and as it is, and a `fit`, on several machines; what does not work there."""
    devices = spread(devices)
    here = compiled(net(["CPU:0"] * 4, skip=True), "adam")
    want = run(here, train_step(here), batches())
    model = net(["CPU:0"] * 4, skip=True)
    cuts = tflms_sft.stage_devices(model, CUTS, devices)
    step = train_step(compiled(model, "adam"))
    places = {v.value.device for v in variables(model)}
    say("variables", sorted(places))
    for schedule, count in [("basic", 1), ("1f1b", 4)]:
        params = tflms_sft.PipelineParams(cuts, schedule, count, devices)
        rewritten = tflms_sft.rewrite(step, params, *batches(1)[0])
        used = {op.device for op in rewritten.concrete_function.graph.get_operations() if op.type == "Conv2D"}
        error = largest_error(run(model, rewritten, batches()), want)
        say(f"rewrite {schedule}", {"error": error, "devices": sorted(used)})
    say("disk", refusal(lambda: tflms_sft.rewrite(step, tflms_sft.LMSParams(tier="disk", min_bytes=1), *batches(1)[0])))
    swaps = [tflms_sft.LMSParams(tier="disk", min_bytes=1), tflms_sft.PipelineParams(cuts, "gpipe", 2, devices)]
    say("disk in stages", refusal(lambda: tflms_sft.rewrite(step, swaps, *batches(1)[0])))
    say("tiles in stages", tiled(devices))
    say("measure", refusal(lambda: tflms_sft.measure(rewritten, *batches(1)[0])))
    copied = tflms_sft.PipelineParams(CUTS, "gpipe", 2, devices, placement="copy")
    open_step = tf.function(train_step(here).python_function, input_signature=OPEN, autograph=False)
    rewritten = tflms_sft.rewrite(open_step, copied, *batches(1)[0])
    say("measure any size", refusal(lambda: tflms_sft.measure(rewritten, *batches(1)[0])))
    say("twice", refusal(lambda: tflms_sft.connect(["127.0.0.1:1"])))
    pipeline = tflms_sft.Pipeline(cuts, "1f1b", 4, devices)
    say("fit", largest_error(fitted(devices, [pipeline], 2, 22), fitted(["CPU:0"] * 4, [], 2, 22)))


def tiled(devices):
    """Loops on several machines: how far off, and where they are."""
    model = compiled(net(devices, skip=True, deep=True), "adam")
    step = train_step(model)
    params = [tflms_sft.SFTParams((2, 2)), tflms_sft.PipelineParams(CUTS, "1f1b", 2, devices)]
    rewritten = tflms_sft.rewrite(step, params, *batches(1)[0])
    loops = {op.device for op in rewritten.concrete_function.graph.get_operations() if "While" in op.type}
    here = compiled(net(["CPU:0"] * 4, skip=True, deep=True), "adam")
    want = run(here, train_step(here), batches(2))
    return {"error": largest_error(run(model, rewritten, batches(2)), want), "devices": len(loops)}


def fitted(devices, callbacks, epochs=EPOCHS, samples=24):
    """Every variable after a training."""
    model = compiled(net(devices, skip=True), "adam")
    x, y = (np.concatenate(parts)[:samples] for parts in zip(*batches(3), strict=True))
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    say("losses", model.evaluate(x, y, batch_size=8, verbose=0))
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


class Told(keras.callbacks.Callback):
    """Tells of the step that is to fail, and waits until somebody says go on."""

    def __init__(self, wait):
        super().__init__()
        self.wait = wait
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.wait == "step" and self.epochs[-1] == KILLED_IN and batch == 1:
            self.ready()

    def on_epoch_end(self, epoch, logs=None):
        if self.wait == "save" and epoch == KILLED_IN:
            self.ready()

    def ready(self):
        say("ready", len(self.epochs))
        sys.stdin.readline()


def train(devices, directory, wait):
    """Train with a backup; whatever ends it is what ends the program."""
    devices = spread(devices)
    told = Told(wait)
    backup = keras.callbacks.BackupAndRestore(directory)
    pipeline = tflms_sft.Pipeline(CUTS, "1f1b", 4, devices)
    try:
        got = fitted(devices, [pipeline, told, backup])
    except tflms_sft.WorkerError as error:
        say("lost", {"text": str(error), "workers": error.workers, "cause": type(error.__cause__).__name__})
        raise
    say("epochs", told.epochs)
    say("error", largest_error(got, fitted(["CPU:0"] * 4, [])))


def main():
    what, addresses, *more = sys.argv[1:]
    devices = tflms_sft.connect(addresses, timeout=60)
    say("devices", devices)
    keras.config.set_floatx("float64")
    {"equal": equal, "train": train}[what](list(devices), *more)


if __name__ == "__main__":
    main()
