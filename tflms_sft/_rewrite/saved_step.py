"""A traced step in files, from which it is planned and rewritten again without the user's code and data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.estimates.op_cost import MachineRates
from rewriters.ir import tf_internals
from rewriters.ir.device_model import Card, DeviceModel
from tflms_sft._rewrite.plan_recipe import Recipe
from tflms_sft._search.traced_step import TracedStep, analyse_step
from tflms_sft._trace.layer_names import LayerCall, LayerRecord

GRAPH, INTERFACE, SCRIPT = "step.pb", "step.json", "reproduce.py"

_SCRIPT = '''"""Rewrites the saved step again with the present code, and compares the graph after each pass.

    python reproduce.py         # all passes; prints the first difference
    python reproduce.py 7       # stops after pass 7, and prints the difference in its graph
"""

import pathlib
import sys

from tflms_sft._rewrite.reproduction import reproduce

sys.exit(not reproduce(pathlib.Path(__file__).parent, *map(int, sys.argv[1:2])))
'''


@dataclasses.dataclass(frozen=True)
class SavedGraph:
    """The graph of a saved step, with its ops in the order in which they were traced.

    Attributes:
        graph: The graph as TensorFlow imported it, which sorts the ops.
        names: Names of the ops as they were traced.
        control_outputs: Operations that the step runs for their effect alone.
    """

    graph: Any
    names: list[str]
    control_outputs: list[Any]

    def get_operations(self) -> list[Any]:
        """Return the operations."""
        return [self.graph.get_operation_by_name(name) for name in self.names]

    def as_graph_def(self, add_shapes: bool = False) -> Any:
        """Return the definition of the graph."""
        graph_def = self.graph.as_graph_def(add_shapes=add_shapes)
        nodes = {node.name: node for node in graph_def.node}
        in_order = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
        in_order.node.extend(nodes[name] for name in self.names)
        return in_order


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """The parts of a traced function that planning and rewriting read; it cannot be called.

    Attributes:
        graph: The graph.
        inputs: Placeholders of the arguments, then of the captured tensors.
        outputs: Flat results.
        captured_inputs: Placeholders of the captured tensors.
    """

    graph: SavedGraph
    inputs: list[Any]
    outputs: list[Any]
    captured_inputs: list[Any]


def save_step(directory: Path, traced: TracedStep, recipe: Recipe) -> None:
    """Write a traced step with its plan to files of a directory, and a script that rewrites it again."""
    concrete_fn, record = traced.concrete_fn, traced.record
    numbers = {id(call): number for number, call in enumerate(record.calls)}
    specs = {tensor.name: tf_internals.variable_spec(tensor) for tensor in concrete_fn.inputs}
    interface = {
        "inputs": [tensor.name for tensor in concrete_fn.inputs],
        "num_captured": len(concrete_fn.captured_inputs),
        "variables": {name: (spec[0].name, spec[1]) for name, spec in specs.items() if spec is not None},
        "outputs": [tensor.name for tensor in concrete_fn.outputs],
        "effects": [operation.name for operation in tf_internals.control_outputs(concrete_fn)],
        "layers": [[call.layer, call.kind, call.outputs, call.ops, call.trainable] for call in record.calls],
        "layer_of_op": {name: numbers[id(call)] for name, call in record.layer_of_op.items()},
        "model_inputs": record.inputs,
        "mode": traced.mode.value,
        "batch": traced.batch,
        "sizes": list(traced.analysis.graph.sizes.items()),
        "rates": dataclasses.asdict(traced.rates),
        "variable_bytes": list(traced.variables),
        "devices": list(traced.devices),
        "device": {**dataclasses.asdict(traced.device), "processor_flags": sorted(traced.device.processor_flags)},
        "recipe": recipe,
    }
    graph_def = concrete_fn.graph.as_graph_def(add_shapes=True)  # Reads of variables have no shape otherwise.
    graph_def.library.CopyFrom(concrete_fn.graph.as_graph_def().library)  # TensorFlow knows functions as traced.
    (directory / GRAPH).write_bytes(graph_def.SerializeToString())
    (directory / INTERFACE).write_text(json.dumps(interface), encoding="utf-8")
    (directory / SCRIPT).write_text(_SCRIPT, encoding="utf-8")


def load_step(directory: Path) -> tuple[TracedStep, Recipe]:
    """Return the analysed step of a directory, with its ops in the order in which they were traced, and its plan."""
    saved = json.loads((directory / INTERFACE).read_text(encoding="utf-8"))
    graph, graph_def = tf.Graph(), tf.compat.v1.GraphDef.FromString((directory / GRAPH).read_bytes())
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    for name, (dtype, shape) in saved["variables"].items():
        tf_internals.set_handle_spec(graph.get_tensor_by_name(name), tf.dtypes.as_dtype(dtype), shape)
    inputs, outputs = ([graph.get_tensor_by_name(name) for name in saved[key]] for key in ("inputs", "outputs"))
    effects = [graph.get_operation_by_name(name) for name in saved["effects"]]
    traced_graph = SavedGraph(graph, [node.name for node in graph_def.node], effects)
    concrete_fn = SavedStep(traced_graph, inputs, outputs, inputs[len(inputs) - saved["num_captured"] :])
    calls = [LayerCall(*call) for call in saved["layers"]]
    record = LayerRecord(calls, saved["model_inputs"], {op: calls[n] for op, n in saved["layer_of_op"].items()})
    traced = analyse_step(concrete_fn, record, saved["batch"], CanonicalMode(saved["mode"]), sizes=dict(saved["sizes"]))
    traced = dataclasses.replace(
        traced, rates=MachineRates(**saved["rates"]), variables=saved["variable_bytes"], devices=saved["devices"]
    )
    return traced, saved["recipe"]


def load_device(directory: Path) -> DeviceModel:
    """Return the device that the step of a directory was rewritten for."""
    facts = json.loads((directory / INTERFACE).read_text(encoding="utf-8"))["device"]
    card = facts["card"] and Card(**facts["card"])
    return DeviceModel(**{**facts, "card": card, "processor_flags": frozenset(facts["processor_flags"])})
