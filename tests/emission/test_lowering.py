"""Programs of tile loops against the TensorFlow ops that the emission makes of each instruction."""

import itertools
import re

import pytest
import tensorflow as tf
from devices import planning_for_card
from equivalence import Cut, keras_step, plan
from nets import conv, dilated, frozen_norm, halves, residual, separable, unet, vgg

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.emission import loop_outputs
from rewriters.emission.loop_emitter import IterationEmitter, trace_loop
from rewriters.emission.loop_program import Run
from rewriters.emission.lowering import lower
from rewriters.estimates.instruction_cost import InstructionCosts

IMAGES = 2

FREE = {"Const", "Identity", "NoOp", "Placeholder", "EnsureShape", "Reshape", "Cast", "HostConst"}
"""Ops that copy nothing, and casts of the places of tiles."""


def planned(net, size, cut):
    analysis = GraphAnalysis(read_canonical(keras_step(net, size, IMAGES, steps=1).concrete_fn))
    (segment_plan,) = plan(analysis, [cut])
    return analysis, segment_plan


class Recorder:
    """Records the ops that each instruction emits, and the values of its parts."""

    def __init__(self, monkeypatch):
        self.ops, self.values = {}, {}
        self._record(monkeypatch, IterationEmitter, "_emit", lambda emitter, instruction: instruction)
        for output in loop_outputs.LoopOutput.__subclasses__():
            self._record(monkeypatch, output, "update", lambda output, iteration, _: (iteration, output))

    def _record(self, monkeypatch, owner, name, key):
        method = getattr(owner, name)

        def recorded(self_, *args):
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            result = method(self_, *args)
            emitted = graph.get_operations()[before:]
            self.ops[key(self_, *args)] = [op for op in emitted if op.type not in FREE and _is_on_device(op)]
            if isinstance(self_, IterationEmitter):
                self.values.update(self_._values)
            return result

        monkeypatch.setattr(owner, name, recorded)

    def of_outputs(self):
        """Return the ops of the outputs, in order."""
        return [ops for key, ops in self.ops.items() if isinstance(key, tuple)]


def _is_on_device(op):
    return not op.outputs or any(tensor.dtype not in (tf.int32, tf.bool) for tensor in op.outputs)


def conv_pair(x):
    return conv(4, use_bias=False, name="out")(conv(4, use_bias=False, name="first")(x))


FORWARD = """
%0 data_0:0[0:8, 0:8] = Slice()
%1 data_0:0[-1:8, -1:9] = Fit(%0)
%2 convolution:0[0:7, 0:8] = Run(convolution, %1, ReadVariableOp:0)
%3 Relu:0[0:7, 0:8] = Run(Relu, %2)
%4 Relu:0[-1:7, -1:9] = Fit(%3)
%5 convolution:0[0:6, 0:8] = Run(convolution, %4, ReadVariableOp:0)
%6 Relu:0[0:6, 0:8] = Run(Relu, %5)
Write(%6)
"""

BACKWARD_STRIPS = """
%0 data_0:0[0:8, 0:8] = Slice()
%1 data_0:0[-1:8, -1:9] = Fit(%0)
%2 convolution:0[0:7, 0:8] = Run(convolution, %1, ReadVariableOp:0)
%3 Relu:0[0:7, 0:8] = Run(Relu, %2)
%4 truediv:0[0:6, 0:8] = Slice()
%5 Relu:0[0:6, 0:8] = Slice() after %4
%6 ReluGrad:0[0:6, 0:8] = Run(ReluGrad, %4, %5)
%7 Conv2DBackpropInput:0[-1:7, -1:9] = Run(Conv2DBackpropInput, ReadVariableOp:0, %6)
%8 Conv2DBackpropInput:0[5:7, 0:8] = Receive(%7)
%9 Conv2DBackpropInput:0[-1:7, -1:9] = AddRows(%7, %8)
%10 Conv2DBackpropInput:0[0:7, 0:8] = Fit(%9)
%11 Conv2DBackpropInput:0[0:0, 0:8] = Fit(%9)
%12 Relu:0[-1:7, -1:9] = Fit(%3) after %6
%13 Conv2DBackpropFilter:0 = Run(Conv2DBackpropFilter, %12, static_0:0, %6)
%14 Relu:0[0:7, 0:8] = Fit(%12) after %10
%15 ReluGrad:0[0:7, 0:8] = Run(ReluGrad, %10, %14)
%16 data_0:0[-1:8, -1:9] = Fit(%0) after %15
%17 Conv2DBackpropFilter:0 = Run(Conv2DBackpropFilter, %16, static_0:0, %15)
Reduce(%13)
Reduce(%17)
Carry(%11)
"""


@pytest.mark.parametrize(
    ("halo", "number", "text"), [("recompute", 0, FORWARD), ("carry", 1, BACKWARD_STRIPS)], ids=["tiles", "strips"]
)
def test_text_of_a_program_shows_every_instruction(halo, number, text):
    analysis, segment_plan = planned(conv_pair, (12, 8), Cut(grid=(2, 1), halo=halo))
    program = str(lower(analysis, segment_plan.loops[number]))
    assert re.sub(r"[\w/]*/(\w+)", r"\1", program) == text.strip(), "names without their scopes"


CUTS = {
    "tiles": Cut(grid=(2, 2)),
    "rows": Cut(grid=(3, 1)),
    "strips": Cut(grid=(3, 1), halo="carry"),
    "uneven strips": Cut(grid=(2, 1), backward_grid=(4, 1), halo="carry"),
    "images": Cut(grid=(1, 1), batch=2),
    "one tile": Cut(grid=(1, 1)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("net", [vgg, residual, unet, separable, dilated, frozen_norm, halves])
def test_instructions_emit_the_ops_of_their_estimates(net, cut, monkeypatch):
    check_instructions(*planned(net, (36, 24), CUTS[cut]), monkeypatch)


@pytest.mark.parametrize("cut", ["tiles", "strips"])
def test_instructions_for_a_gpu_emit_the_ops_of_their_estimates(cut, monkeypatch):
    with planning_for_card("rtx2080ti"):
        analysis, segment_plan = planned(vgg, (36, 24), CUTS[cut])
    check_instructions(analysis, segment_plan, monkeypatch)


def check_instructions(analysis, segment_plan, monkeypatch):
    """Check that each instruction emits as many ops as the cost model counts, and that parts have their sizes."""
    for tile_loop in segment_plan.loops:
        recorder = Recorder(monkeypatch)
        program, costs = lower(analysis, tile_loop), InstructionCosts(analysis, IMAGES, tile_loop.grid.num_tiles)
        trace_loop(analysis, segment_plan.segment, tile_loop)
        others = [one for one in program.instructions if not isinstance(one, Run)]
        for instruction, ops in itertools.chain(
            ((one, recorder.ops[one]) for one in others), zip(program.outputs, recorder.of_outputs(), strict=True)
        ):
            assert len(ops) == costs.of_instruction(instruction).calls, (instruction, [op.type for op in ops])
        for part, value in recorder.values.items():
            for dim, size in known_sizes(analysis, part).items():
                assert value.shape[dim] in (size, None), part
        monkeypatch.undo()


def known_sizes(analysis, part):
    """Return the sizes of a part along dimensions in which all tiles have as many rows."""
    if part.region is None:
        return {}
    dims = analysis.layouts.of(part.tensor).dims
    sizes = zip(dims, (set(rows.size.tolist()) for rows in part.region), strict=True)
    return {dim: next(iter(size)) for dim, size in sizes if dim is not None and len(size) == 1}
