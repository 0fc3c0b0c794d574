"""Networks in stages, and steps that accumulate gradients by hand; a helper, no test.

Run as a program it prints what needs several devices, for `test_pipeline_pass.py`.
"""

import os
import re
import sys

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # As in conftest.py: a process of its own does not read that.

import keras
import numpy as np
import tensorflow as tf
from children import say
from keras import layers

from tflms_sft._verify.differences import difference as error

CUTS = ["stage0", "stage1", "stage2"]
BATCH = 8
HERE = ["CPU:0"] * 4
OPEN = tf.TensorSpec((None, 8, 8, 3), "float64"), tf.TensorSpec((None,), "int64")
SCHEDULES = [("basic", 1), ("basic", 4), ("gpipe", 4), ("1f1b", 4), ("mast", 4), ("master", 4)]


def net(devices, skip=False, norm=False, size=8, deep=False):
    """Four stages; a connection may skip from the first to the last. Deep ones have something to recompute."""
    keras.utils.set_random_seed(1)
    image = x = keras.Input((size, size, 3))
    kept = None
    for number in range(4):
        with tf.device(devices[number]):
            if deep:
                x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"inner{number}")(x)
            x = layers.Conv2D(4, 3, padding="same", name=f"conv{number}")(x)
            if norm:
                x = layers.BatchNormalization(name=f"norm{number}")(x)
            if number == 3 and skip:
                x = layers.Multiply()([x, kept])
                x = layers.Concatenate()([x, kept])
            x = layers.Activation("tanh", name=f"stage{number}")(x)
            kept = x if number == 0 else kept
    with tf.device(devices[3]):
        x = layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, x)


def optimizers():
    return {"adam": keras.optimizers.Adam(0.01), "momentum": keras.optimizers.SGD(0.1, momentum=0.9)}


def compiled(model, optimizer, size=8):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers()[optimizer], loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=batches(1, size)[0])
    return model


def batches(count=5, size=8):
    random = np.random.default_rng(0)
    return [(random.normal(size=(BATCH, size, size, 3)), np.arange(BATCH) % 3) for _ in range(count)]


def of_sizes(*sizes):
    """Batches of these sizes."""
    return [(x[:size], y[:size]) for (x, y), size in zip(batches(len(sizes)), sizes, strict=True)]


def variables(model):
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def train_step(model):
    """Keras's own, with the loss of the batch and the gradients beside the logs."""

    def function(x, y):
        return model.train_step((x, y))

    return tf.function(function, autograph=False)


def hand_step(model):
    """A custom loop: returns the loss, gradients and logits."""

    def function(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = model.loss(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "logits": logits, "gradients": gradients}

    return tf.function(function, autograph=False)


def accumulating_step(model, parts):
    """Return a hand-written step that accumulates gradients over parts of the batch before one update."""

    def function(x, y):
        totals, losses = None, []
        for part_x, part_y in zip(tf.split(x, parts), tf.split(y, parts), strict=True):
            with tf.GradientTape() as tape:
                logits = model(part_x, training=True)
                losses.append(model.loss(part_y, logits))
            found = tape.gradient(losses[-1], model.trainable_variables)
            totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
        model.optimizer.apply([total / parts for total in totals], model.trainable_variables)
        return tf.add_n(losses) / parts

    return tf.function(function, autograph=False)


def run(model, step, data):
    """Results of every step, and every variable after the last, from where the model stands; it is put back."""
    start = [np.array(v) for v in variables(model)]
    found = [np.array(value) for batch in data for value in tf.nest.flatten(step(*map(tf.constant, batch)))]
    found += [np.array(v) for v in variables(model)]
    for variable, value in zip(variables(model), start, strict=True):
        variable.assign(value)
    return found


def largest_error(got, want):
    assert len(got) == len(want)
    return max(error(a, b) for a, b in zip(got, want, strict=True))


# On several devices -----------------------------------------------------------------------------------------


def compare():
    """Every schedule on four devices."""
    import tflms_sft
    from tflms_sft import PipelineParams

    model = compiled(net([f"CPU:{number}" for number in range(4)], skip=True), "adam")
    step = train_step(model)
    want = run(model, step, batches())
    for name, count in SCHEDULES:
        rewritten = tflms_sft.rewrite(step, PipelineParams(CUTS, name, count), *batches(1)[0])
        got = run(model, rewritten, batches())
        equal = all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        result = {"error": largest_error(got, want), "bit equal": equal}
        say(f"{name} {count}", result | where_and_when(rewritten, name, count))


def where_and_when(rewritten, name, count, data=None):
    """Return the devices of ops, and where and when they ran; a step for any batch runs those for the batch's size."""
    from rewriters.ir import tf_internals
    from rewriters.pipelining.schedules import Direction, Slot, make

    schedule = make(name, 4, count)
    data = [tf.constant(a) for a in data or batches(1)[0]]
    importer = rewritten._importer
    way = r"cond/(?:then|else)/_\d+/" if importer.other is not None else ""
    nodes = importer.for_batch(data).graph.nodes.values()
    asked = {n.name: tf_internals.short_device(n.device) for n in nodes if n.device and n.op != "Const"}
    ran, times = {}, {}
    stats = tf_internals.step_stats(rewritten.concrete_function, data)
    for device in stats.dev_stats:
        for node in device.node_stats:
            own = re.sub(f"^{way}", "", node.node_name)
            if way and own == node.node_name:
                continue
            ran[own] = tf_internals.short_device(device.device)
            begin = node.all_start_nanos + node.op_start_rel_nanos
            times[own] = begin, node.all_start_nanos + node.op_end_rel_nanos
    both = asked.keys() & ran.keys()
    layers, strayed, slots = 0, [], {}
    for op in both:
        found = re.search(r"(?:^|micro_(\d+)/)(gradient_tape/)?functional\w*/(?:conv|stage)(\d)_1/", op)
        if not found or "hape" in op or "ReadVariable" in op or "Squeeze" in op:
            continue
        kind = Direction.BACKWARD if found[2] else Direction.FORWARD
        slot = Slot(kind, int(found[1] or 0), int(found[3]))
        layers += 1
        slots.setdefault(slot, []).append(op)
        if ran[op] != f"CPU:{schedule.device_of(slot)}":
            strayed.append([op, ran[op]])
    early = []
    for own in schedule.devices:
        for before, after in zip(own, own[1:], strict=False):
            last = max(times[op][1] for op in slots[before])
            early += [op for op in slots[after] if times[op][0] < last]
    misplaced = [[op, asked[op], ran[op]] for op in both if asked[op] != ran[op]]
    return {
        "placed": len(both),
        "misplaced": misplaced,
        "layers": layers,
        "strayed": strayed,
        "slots": len(slots),
        "early": early,
    }


def replicas():
    """Two pipelines beside each other."""
    import tflms_sft
    from tflms_sft import PipelineParams

    model = compiled(net([f"CPU:{number}" for number in range(4)], skip=True), "adam")
    step = hand_step(model)
    params = PipelineParams(CUTS, "1f1b", 2, data_replicas=2)
    rewritten = tflms_sft.rewrite(step, params, *batches(1)[0])
    used = {op.device for op in rewritten.concrete_function.graph.get_operations() if op.type == "Conv2D"}
    error_of = largest_error(run(model, rewritten, batches()), run(model, step, batches()))
    say("hybrid", {"error": error_of, "devices": len(used)})


def uneven():
    """A step for batches of any size: each as one micro-batch that several do not make, where its stages are."""
    import tflms_sft
    from tflms_sft import PipelineParams

    model = compiled(net([f"CPU:{number}" for number in range(4)], skip=True), "adam")
    step = tf.function(train_step(model).python_function, input_signature=OPEN, autograph=False)
    data = of_sizes(8, 6, 4, 3, 8, 1)
    want = run(model, step, data)
    for name, count, replicas in [("1f1b", 4, 1), ("1f1b", 2, 2)]:
        rewritten = tflms_sft.rewrite(step, PipelineParams(CUTS, name, count, data_replicas=replicas), *data[0])
        result = {"error": largest_error(run(model, rewritten, data), want)}
        if replicas == 1:
            result["even"] = where_and_when(rewritten, name, count)
        result["uneven"] = where_and_when(rewritten, "basic", 1, data[1])
        say(f"uneven {name} {count} {replicas}", result)


def placements():
    """A model in one place: refused, read from there, or moved."""
    import tflms_sft
    from rewriters.ir import tf_internals
    from tflms_sft import PipelineParams, stage_devices

    def refusal(function):
        try:
            function()
        except (tflms_sft.RewriteError, ValueError) as error:
            return str(error)
        return ""

    def place(variable):
        return int(tf_internals.short_device(variable.value.device)[-1])

    model = compiled(net(["CPU:0"] * 4), "adam")
    step, data = train_step(model), batches(1)[0]
    result = {"refused": refusal(lambda: tflms_sft.rewrite(step, PipelineParams(CUTS, "gpipe", 2), *data))}
    want = run(model, step, batches())
    copied = tflms_sft.rewrite(step, PipelineParams(CUTS, "gpipe", 2, placement="copy"), *data)
    result["copied"] = largest_error(run(model, copied, batches()), want)
    result["too late"] = refusal(lambda: stage_devices(model, CUTS))
    model = net(["CPU:0"] * 4)
    before = model(data[0]).numpy()
    model.compile("sgd", "mse", jit_compile=False)
    model.predict(data[0], verbose=0)
    result["cuts"] = list(stage_devices(model, CUTS))
    result["moved"] = [place(variable) for variable in model.variables]
    result["same outputs"] = bool(np.array_equal(model(data[0]).numpy(), before))
    model.variables[0].assign_add(tf.ones_like(model.variables[0]))
    result["stale"] = largest_error([model.predict(data[0], verbose=0)], [model(data[0]).numpy()])
    model.variables[0].assign_sub(tf.ones_like(model.variables[0]))
    compiled(model, "adam")
    slots = model.optimizer.variables[2:]
    result["slots beside"] = [place(v) for v in slots] == [place(v) for v in model.variables for _ in range(2)]
    moved = tflms_sft.rewrite(train_step(model), PipelineParams(CUTS, "gpipe", 2), *data)
    result["error"] = largest_error(run(model, moved, batches()), want)
    say("placement", result)


def updates_with_a_body():
    """Optimizers that leave an update out, which is one operation with the variables of all stages."""
    import tflms_sft
    from tflms_sft import PipelineParams

    x, y = np.random.default_rng(0).normal(size=(8, 6)), np.ones((8, 3))
    found = {}
    for name, optimizer in (
        ("loss scale", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))),
        ("accumulation", keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    ):
        keras.utils.set_random_seed(1)
        sizes = [layers.Dense(5, "tanh", name="a"), layers.Dense(5, "tanh", name="b"), layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *sizes])
        cuts = tflms_sft.stage_devices(model, ["a", "b"], ["CPU:0", "CPU:1", "CPU:2"])
        model.compile(optimizer, "mse", jit_compile=False)
        optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, y))
        step = train_step(model)
        params = PipelineParams(cuts, "1f1b", 4, ["CPU:0", "CPU:1", "CPU:2"])
        rewritten = tflms_sft.rewrite(step, params, x, y)
        found[name] = largest_error(run(model, rewritten, [(x, y)] * 3), run(model, step, [(x, y)] * 3))
    say("bodies", found)


def peaks():
    """Predicted and measured bytes of each device, the update included, with weights in their places or in one."""
    import tflms_sft
    from tflms_sft import PipelineParams

    devices = [f"CPU:{number}" for number in range(3)]
    x, found = np.ones((8, 384)), {}
    for placement in ("check", "copy"):
        model = keras.Sequential([keras.Input((384,)), *(layers.Dense(384, name=name) for name in "abc")])
        cuts = tflms_sft.stage_devices(model, ["a", "b"], devices) if placement == "check" else ["a", "b"]
        model.compile("adam", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        model._symbolic_build(data_batch=(x, x))
        params = PipelineParams(cuts, "1f1b", 4, devices, placement=placement)
        rewritten = tflms_sft.rewrite(train_step(model), params, x, x)
        measured = dict.fromkeys(devices, 0)
        for _ in range(3):
            for line in tflms_sft.measure(rewritten, tf.constant(x), tf.constant(x), timelines=True).timelines:
                name = line.device[line.device.index("CPU") :]
                measured[name] = max(measured.get(name, 0), line.peak_bytes)
        found[placement] = [list(rewritten.plan.pipeline.peak_bytes), [measured[name] for name in devices]]
    say("peaks", found)


# Tiles and swaps inside of stages -------------------------------------------------------------------------------


def tiles(number=2):
    import tflms_sft

    return tflms_sft.SFTParams((number, number))


def insides():
    """Return the rewritings inside stages by name, each as a list for `rewrite` without the pipeline."""
    from tflms_sft import LMSParams, SFTParams

    swaps = LMSParams(tier="disk", min_bytes=1)
    return {
        "tiles": [tiles()],
        "rows": [SFTParams((3, 1), halo="carry")],
        "swaps": [swaps],
        "host": [LMSParams(tier="host", min_bytes=1)],
        "both": [tiles(), swaps],
    }


INSIDE = [("deep skip", "tiles", "master", 2), ("deep skip", "both", "1f1b", 2), ("deep skip", "host", "basic", 2)]
INSIDE += [("norm", "both", "gpipe", 1)]
LONG_INSIDE = [(kind, what, *one) for kind in ("deep", "deep skip") for what in ("tiles", "both") for one in SCHEDULES]
LONG_INSIDE += [("deep skip", what, *one) for what in ("rows", "swaps", "host") for one in SCHEDULES[2:]]


def inside(cases):
    """Stages with tile loops and swaps in them: the numbers, and where loops run."""
    import tflms_sft
    from tflms_sft import PipelineParams

    models = {}
    for kind, what, name, count in cases:
        if kind not in models:
            made = net([f"CPU:{number}" for number in range(4)], "skip" in kind, kind == "norm", deep=True)
            # Before BatchNorm a bias has no gradient but rounding, of which Adam makes steps.
            step = train_step(compiled(made, "momentum" if kind == "norm" else "adam"))
            models[kind] = made, step, run(made, step, batches(3))
        model, step, want = models[kind]
        params = [*insides()[what], PipelineParams(CUTS, name, count)]
        rewritten = tflms_sft.rewrite(step, params, *batches(1)[0])
        error = largest_error(run(model, rewritten, batches(3)), want)
        say(f"{kind} {what} {name} {count}", {"error": error} | where_loops_run(rewritten, name, count))


def where_loops_run(rewritten, name, count):
    """Operations in the bodies of loops, and those of them that ran elsewhere than in their stage."""
    from rewriters.ir import tf_internals
    from rewriters.pipelining.schedules import Direction, Slot, make

    plan, schedule = rewritten.plan, make(name, 4, count)
    stage_of = {segment: stage.number for stage in plan.pipeline.stages for segment in stage.segments}
    inner, strayed = None, []
    if stage_of and name in ("1f1b", "mast"):  # A recorded run takes as long as all the rest.
        inner = 0
        stats = tf_internals.step_stats(rewritten.concrete_function, [tf.constant(a) for a in batches(1)[0]])
        for place, node in ((d.device, n.node_name) for d in stats.dev_stats for n in d.node_stats):
            found = re.match(r"(?:micro_(\d+)/)?sft/(segment\d+)/\w+/while.*/(Conv2D|Conv2DBackprop|Tanh|Relu)", node)
            if found:
                inner += 1
                slot = Slot(Direction.FORWARD, int(found[1] or 0), stage_of[found[2]])
                if not place.endswith(f"CPU:{schedule.device_of(slot)}"):
                    strayed.append([node, place])
    waiting = [stage.waiting_bytes for stage in plan.pipeline.stages]
    return {
        "segments": {segment.name: list(segment.num_tiles) for segment in plan.segments},
        "stages": sorted(stage_of.values()),
        "swaps": len(plan.swaps),
        "inner": inner,
        "strayed": strayed,
        "waiting": waiting,
    }


def replicas_inside():
    """Two pipelines beside each other, tiled and swapped."""
    import tflms_sft
    from tflms_sft import PipelineParams

    model = compiled(net([f"CPU:{number}" for number in range(4)], skip=True, deep=True), "adam")
    step = hand_step(model)
    params = [*insides()["both"], PipelineParams(CUTS, "1f1b", 2, data_replicas=2)]
    rewritten = tflms_sft.rewrite(step, params, *batches(1)[0])
    loops = {op.device for op in rewritten.concrete_function.graph.get_operations() if "While" in op.type}
    error_of = largest_error(run(model, rewritten, batches(2)), run(model, step, batches(2)))
    say("hybrid", {"error": error_of, "devices": len(loops)})


def fitted_inside():
    """Under `fit`, with a batch that is open and a validation that runs plain."""
    import tflms_sft

    def trained(callbacks):
        model = compiled(net([f"CPU:{number}" for number in range(4)], skip=True, deep=True), "adam")
        x, y = (np.concatenate(parts)[:20] for parts in zip(*batches(3), strict=True))
        options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
        told = model.fit(x, y, validation_data=(x[:4], y[:4]), callbacks=callbacks, **options).history
        values = [told[key] for key in sorted(told)]
        return [np.array(v) for v in [*values, *model.variables, *model.optimizer.variables]]

    swaps = tflms_sft.LMSParams(tier="disk", min_bytes=1)
    callback = tflms_sft.Pipeline(CUTS, "1f1b", 2, tiles=tiles(), swaps=swaps, verbose=0)
    result = {"error": largest_error(trained([callback]), trained([]))}
    say("fit", result | {"segments": len(callback.plan.segments), "swaps": len(callback.plan.swaps)})


def recorded_bytes():
    """Return the peak of each device by its allocation records, plain and with tiles, and the predicted peak."""
    import tflms_sft
    from tflms_sft import PipelineParams

    devices = [f"CPU:{number}" for number in range(2)]
    image = x = keras.Input((64, 64, 8))
    for number, device in enumerate(devices):
        with tf.device(device):
            x = layers.Dense(8, name=f"mix{number}")(x)
            for again in range(4):
                x = layers.Activation("tanh")(layers.AveragePooling2D(3, 1, "same", name=f"pool{number}{again}")(x))
            x = layers.Activation("relu", name=f"end{number}")(x)
    with tf.device(devices[1]):
        x = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, x)
    step = train_step(compiled_as_it_is(model))
    data = np.ones((4, 64, 64, 8)), np.arange(4) % 3
    pipeline = PipelineParams(["end0"], "gpipe", 2)
    told = {}
    for name, params in {"plain": pipeline, "tiled": [tiles(3), pipeline]}.items():
        rewritten = tflms_sft.rewrite(step, params, *data)
        runs = [tflms_sft.measure(rewritten, *data, timelines=True).timelines for _ in range(3)]
        # On a busy machine operations run ahead of others now and then, which no prediction has.
        peaks = {line.device: min(run[place].peak_bytes for run in runs) for place, line in enumerate(runs[0])}
        told[name] = {"measured": peaks, "predicted": rewritten.plan.pipeline.peak_bytes}
    say("bytes", told)


def compiled_as_it_is(model):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def main():
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    keras.config.set_floatx("float64")
    if sys.argv[1:] == ["inside"]:
        inside(INSIDE)
        fitted_inside()
        recorded_bytes()
        return
    if sys.argv[1:] == ["inside", "long"]:
        inside(LONG_INSIDE)
        replicas_inside()
        return
    compare()
    replicas()
    uneven()
    placements()
    updates_with_a_body()
    peaks()


def fitted(callbacks, norm=False, size=16, steps=1, **options):
    keras.utils.set_random_seed(3)
    model = net(HERE, skip=True, norm=norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(sgd, loss, metrics=["accuracy"], steps_per_execution=steps, jit_compile=False)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(size, 8, 8, 3)), np.arange(size) % 3
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    told = model.fit(x, y, callbacks=callbacks, **settings).history
    values = [told[key] for key in sorted(told)]
    return [np.array(value) for value in [*values, *model.variables, *model.optimizer.variables]]


if __name__ == "__main__":
    main()
