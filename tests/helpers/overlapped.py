"""A program: steps with swaps on a device whose ops and transfers sleep, so that their times hardly depend on load.

Convolutions and their gradients run one at a time, and so do transfers of a direction. Prints, for swap-ins without and
with leads, and for a link that limits the step: the fraction of swap-in time that is hidden behind computation, the
time that the device waits, the time of a step, its simulated time, the time of `MachineRates.swapped`, and the largest
difference to the results of the original step.
"""

import os

os.environ["TF_NUM_INTEROP_THREADS"] = "16"  # Sleeping ops hold a thread.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

import dataclasses
import statistics
import threading
import time

import numpy as np
import tensorflow as tf
from children import say
from equivalence import error, keras_step
from keras import layers

from benchmarks._gpu_trace import hidden_fraction
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.estimates.op_cost import NOMINAL
from rewriters.ir.graph import predecessors
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.step_importer import StepImporter
from rewriters.swapping import tiers
from rewriters.swapping.swap_pass import SwapOptions, insert_swaps, plan_swaps, without_copies
from rewriters.swapping.transfer_schedule import LeadTimes, simulate

OP_SECONDS, LAYERS, STEPS = 0.02, 16, 3
SLOW = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


class SleepingTier(tiers.HostTier):
    """Transfers that take a time in proportion to their bytes, one at a time in each direction.

    Attributes:
        records: (lane, name, begin, end) of each sleep.
    """

    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.records = []
        self._lanes = {lane: threading.Lock() for lane in ("compute", "out", "in")}

    def swap_out(self, graph, tensor, name, times):
        return self.add(graph, tensor, "out", name, tensor.num_bytes() / self.rate, [])

    def swap_in(self, graph, held, like, control, name):
        return self.add(graph, held, "in", name, like.num_bytes() / self.rate, [control])

    def add(self, graph, operand, lane, name, seconds, controls):
        """Add an identity that sleeps."""

        def sleep(array):
            with self._lanes[lane]:
                begin = time.perf_counter()
                time.sleep(seconds)
                self.records.append((lane, name, begin, time.perf_counter()))
            return array

        def call(value):
            result = tf.numpy_function(sleep, [value], operand.dtype, stateful=True)
            return tf.ensure_shape(result, operand.shape)

        results = [(operand.shape, operand.dtype)]
        (copy,), calls = self._spliced(graph, name, call, [operand], results, controls)
        self.operations.extend(calls)
        return copy

    def slow_down(self, graph):
        """Let the device sleep before each slow op, when all operands of the op exist."""
        for node in list(graph.nodes.values()):
            if node.op in SLOW:
                position = 0 if node.op == "Conv2D" else 2
                controls = list(dict.fromkeys(predecessors(node)))
                name = graph.unique_name(f"{node.name}/sleep")
                node.inputs[position] = self.add(graph, node.inputs[position], "compute", name, OP_SECONDS, controls)


def net(x):
    for _ in range(LAYERS):
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    return x


def main():
    step = keras_step(net, (16, 24), 2, steps=STEPS)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    analysis = in_memory_order(without_copies(analysis.graph), 1, 2)
    want = step.run(step.concrete_fn)
    options = SwapOptions(incl_types=("Relu",), ctrld_strategy="direct_order", fuse_swapins=True)
    size = plan_swaps(analysis, options, 2).swaps[0].tensor.num_bytes(2)

    def seconds(node):
        return OP_SECONDS if node.op in SLOW else 0.0

    for name, lead, transfer_seconds in (("lb", 0, 0.015), ("lead", 1, 0.015), ("full link", 1, 0.045)):
        tier = SleepingTier(size / transfer_seconds)
        plan = plan_swaps(analysis, options, 2, LeadTimes(seconds, tier.rate, lead) if lead else None)
        result = insert_swaps(analysis, plan.swaps, tier, 2)
        durations = [dict.fromkeys(nodes, transfer_seconds) for nodes in (result.swap_outs, result.swap_ins)]
        say(f"{name} swaps", len(plan.swaps))
        say(f"{name} simulated", simulate(result.graph, seconds, *durations).seconds)
        rates = dataclasses.replace(NOMINAL, copied=tier.rate, overlapped=True)
        transferred = (size * len(lane) for lane in durations)
        say(f"{name} by rates", rates.swapped(sum(map(seconds, analysis.order)), *transferred, to_disk=False))
        tier.slow_down(result.graph)
        importer = StepImporter(result.graph, step.concrete_fn, tier)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in step.concrete_fn.inputs[: importer.num_arguments]]
        function = tf.function(lambda *args, importer=importer: importer(args), input_signature=specs)
        got = step.run(function.get_concrete_function())
        say(f"{name} difference", max(error(got[key], want[key]) for key in want))
        report(name, tier.records)


def report(name, records):
    """Print the medians over steps of what happened."""
    per_step = len(records) // STEPS
    records.sort(key=lambda record: record[2])
    figures = []
    for number in range(STEPS):
        lanes = {"compute": [], "out": [], "in": []}
        for lane, _, begin, end in records[number * per_step : (number + 1) * per_step]:
            lanes[lane].append((begin, end))
        compute = lanes["compute"]
        begins, ends = min(begin for begin, _ in compute), max(end for _, end in compute)
        waited = ends - begins - sum(end - begin for begin, end in compute)
        figures.append((hidden_fraction(lanes["in"], compute), waited, ends - begins))
    for title, values in zip(("hidden", "waited", "seconds"), np.transpose(figures), strict=True):
        say(f"{name} {title}", statistics.median(values))


if __name__ == "__main__":
    main()
