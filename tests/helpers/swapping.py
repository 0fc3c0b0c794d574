"""Steps with swaps, and a comparison of their bits with those of the original step; a helper, no test."""

import dataclasses
import os

import numpy as np
import tensorflow as tf
from equivalence import plan

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import tile_pass
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.step_importer import StepImporter
from rewriters.swapping.swap_pass import SwapOptions, insert_swaps, plan_swaps, without_copies
from rewriters.swapping.tiers import HostTier


@dataclasses.dataclass
class Swapped:
    """A step with swaps: its plan, its graph, and the function."""

    plan: object
    graph: object
    function: object


def swapped(step, tier=None, max_in_flight=2, cuts=(), times=None, **options):
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    if cuts:
        analysis = GraphAnalysis(tile_pass.tile_segments(analysis, plan(analysis, cuts)))
    analysis = in_memory_order(without_copies(analysis.graph), 1, 2)
    tier = tier or HostTier()
    swap_plan = plan_swaps(analysis, SwapOptions(**options), 2, times)
    graph = insert_swaps(analysis, swap_plan.swaps, tier, max_in_flight).graph
    importer = StepImporter(graph, step.concrete_fn, tier)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in step.concrete_fn.inputs[: importer.num_arguments]]
    function = tf.function(lambda *args: importer(args), input_signature=specs).get_concrete_function()
    return Swapped(swap_plan, graph, function)


def same_bits(step, function):
    want, got = step.run(step.concrete_fn), step.run(function)
    assert list(want) == list(got)
    return all(np.array_equal(got[name], want[name]) for name in want)


def num_unread(store):
    """Return the number of records of a spill store that have reads to come."""
    return len(store._held)


def file_bytes(store):
    """Return the bytes of all open files of a spill store, those that the next step overwrites included."""
    files = {record.file for record in store._held.values()}.union(store._shared_file, *store._free.values())
    return sum(os.fstat(file.fileno()).st_size for file in files)
