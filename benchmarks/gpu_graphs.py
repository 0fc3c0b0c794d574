"""Checks the graphs of rewritten steps for a GPU, without one.

    python -m benchmarks.gpu_graphs [--nets NET ...] [--plans PLAN ...] [--workers 2] [--results FILE]

Every step is planned for an H200 and rewritten in a process of its own. Figures are stored immediately, so that an
interrupted run continues. `MEASUREMENTS` are the functions that each step goes through:

- `kernels`: ops without a GPU kernel, image-size tensors in host memory, and copies between host and GPU in one
  iteration of a loop (`rewriters/device/kernel_audit.py`).
- `layout`: what TensorFlow's graph optimizers do to the step on that GPU, by default and with the options of rewritten
  steps (`benchmarks/_graph_optimizers.py`). Its memory is 5 % larger than the predicted peak, so that the memory
  optimizer begins to work. Steps in float32 only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _gpu_checks, _results
from benchmarks.gpu import NETWORKS

CARD = "h200"
BATCH = 2
IMAGE_SIZE = 96
VOLUME_SIZE = 32
MEMORY_RATIO = 1.05
"""Memory of the GPU of the graph optimizers, over the predicted peak."""
PLANS = ("original", "tiles", "strips", "swaps")
"""Plans of every network. Strips carry their halo rows; tiles have barriers where a network has BatchNorm."""
PIPELINED = ("vgg16", "resnet50")
FURTHER_TYPES = {
    "float64": ("vgg16", "resnet50"),
    "mixed_float16": ("vgg16", "resnet50", "unet3d-dice", "MobileNetV2", "ConvNeXtTiny"),
}

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to check.

    Attributes:
        net: Network.
        dtype: Type of its tensors, or policy of Keras.
        plan: One of `PLANS`, or `"pipeline"`.
    """

    net: str
    dtype: str
    plan: str

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.net}/{self.dtype}/{self.plan}"


def cases() -> Iterator[Case]:
    """Yield all steps to check."""
    for net in NETWORKS:
        yield from (Case(net, "float32", plan) for plan in PLANS)
        if net in PIPELINED:
            yield Case(net, "float32", "pipeline")
    for dtype, nets in FURTHER_TYPES.items():
        yield from (Case(net, dtype, plan) for net in nets for plan in PLANS)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step to measure, original or rewritten.

    Attributes:
        function: The traced step.
        graph: Its graph, on GPUs.
        peak_bytes: Predicted peak; `None` for the original step.
    """

    function: Any
    graph: Any
    peak_bytes: int | None


def kernels(step: Traced) -> Figures:
    """Return the figures of the kernel audit."""
    from rewriters.device.kernel_audit import audit_graph

    audit = audit_graph(step.graph)
    tensors = [tensor for loop in audit.loops for tensor in loop.tensors]
    return {
        "ops": audit.num_ops,
        "missing": dict(Counter(f"{missing.op} {missing.dtype}" for missing in audit.missing)),
        "host_tensors": dict(Counter(f"{tensor.op} {tensor.dtype}" for tensor in audit.host_tensors)),
        "loops": len(audit.loops),
        "copies": dict(Counter(f"{tensor.op} {tensor.dtype}" for tensor in tensors)),
        "copied_bytes": sum(tensor.num_bytes for tensor in tensors),
        "small_to_host": max((loop.small_to_host for loop in audit.loops), default=0),
        "small_to_gpu": max((loop.small_to_gpu for loop in audit.loops), default=0),
        "swaps": audit.num_swaps,
    }


def layout(step: Traced) -> Figures:
    """Return the figures of the graph optimizers."""
    from benchmarks import _graph_optimizers
    from rewriters.device.cards import CARDS

    memory = None if step.peak_bytes is None else int(MEMORY_RATIO * step.peak_bytes)
    return _graph_optimizers.layout_figures(step.function, CARDS[CARD], memory)


MEASUREMENTS: dict[str, Callable[[Traced], Figures]] = {"kernels": kernels, "layout": layout}
"""Functions of a step, by the name of their figures."""


def measurements(case: Case) -> list[str]:
    """Return the names of the measurements of a step."""
    is_plain = case.dtype == "float32" and case.plan != "pipeline"
    return list(MEASUREMENTS) if is_plain else ["kernels"]


def measure(*, net: str, dtype: str, plan: str, emit: _child.Emit) -> Figures:
    """Rewrite a step for a GPU and return the figures of all measurements."""
    del emit
    import keras
    import tensorflow as tf

    import tflms_sft
    from rewriters.device.cards import CARDS
    from rewriters.ir.device_model import planning_for
    from rewriters.ir.graph_reader import from_concrete_function

    if plan == "pipeline":
        configuration = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], configuration)
    if dtype == "mixed_float16":
        keras.config.set_dtype_policy(dtype)
    else:
        keras.config.set_floatx(dtype)
    task = _gpu_checks.network_task(net)
    size = VOLUME_SIZE if task.dimensions == 3 else IMAGE_SIZE
    step = _gpu_checks.training_step(task, size, BATCH, "float32" if dtype == "mixed_float16" else dtype)
    tiles = tflms_sft.SFTParams(num_tiles=(2,) * task.dimensions)
    params = {
        "tiles": tiles,
        "strips": tflms_sft.SFTParams(num_tiles=(4,) + (1,) * (task.dimensions - 1), halo="carry"),
        "swaps": tflms_sft.LMSParams(tier="host", n_tensors=8, min_bytes=1),
        "pipeline": [tflms_sft.PipelineParams(stages=2, batch_norm="micro", micro_batches=2, placement="copy"), tiles],
    }
    data: tuple[Any, ...] = ()
    if plan == "pipeline":  # Micro-batches need a trace for any batch size.
        step, data = tf.function(step.python_function, autograph=False), task.noise(size, BATCH)
    with planning_for(CARDS[CARD].device_model):
        if plan == "original":
            function, headline, peak = step.get_concrete_function(), "", None
        else:
            rewritten = tflms_sft.rewrite(step, params[plan], *data)
            function, headline = rewritten.concrete_function, rewritten.plan.headline()
            peak = rewritten.plan.predicted.peak_bytes
        graph = from_concrete_function(function)
        if plan == "pipeline":
            _move_to_gpus(graph)
        traced = Traced(function, graph, peak)
        figures = {name: MEASUREMENTS[name](traced) for name in measurements(Case(net, dtype, plan))}
    return {"headline": headline, **figures}


def _move_to_gpus(graph: Any) -> None:
    """Replace the CPUs that the stages of a pipeline are on, for want of GPUs, in place."""
    for node in graph.nodes.values():
        node.device = node.device.replace("CPU", "GPU")
    for function in graph.library.function:
        for node_def in function.node_def:
            node_def.device = node_def.device.replace("CPU", "GPU")


def kernel_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table of the kernel audit: a line for each network and type, with numbers by plan."""
    lines = [["network", "type", "ops", "no GPU kernel", "on the host", "copies", "numbers to host", "to GPU", "swaps"]]
    plans = (*PLANS, "pipeline")
    for net, dtype in dict.fromkeys((case.net, case.dtype) for case in cases()):
        measured = [stored.get(Case(net, dtype, plan).name, {}).get("kernels") for plan in plans]
        if not any(measured):
            continue
        ops = " / ".join("-" if figures is None else f"{figures['ops']:,}" for figures in measured[: len(PLANS)])
        present = [figures for figures in measured if figures is not None]
        named = (_counted([figures[key] for figures in present]) for key in ("missing", "host_tensors", "copies"))
        numbers = (max(figures[key] for figures in present) for key in ("small_to_host", "small_to_gpu", "swaps"))
        lines.append([net, dtype, ops, *named, *map(str, numbers)])
    return _results.markdown(lines)


def _counted(counts: Sequence[Mapping[str, int]]) -> str:
    """Return the largest number of each name as text, such as `2 MaxPool3D float64`; 0 without names."""
    largest = {name: max(count.get(name, 0) for count in counts) for count in counts for name in count}
    return ", ".join(f"{number} {name}" for name, number in largest.items()) or "0"


def layout_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table of the graph optimizers: a line for each network, with numbers by plan."""
    title = ["network", "transposes", "in loops", "channels first", "fused", "sums in loops", "the optimizer fails for"]
    lines = [[*title, "with the options of rewritten steps"]]
    for net in NETWORKS:
        measured = {plan: stored.get(Case(net, "float32", plan).name, {}).get("layout") for plan in PLANS}
        present = {plan: figures for plan, figures in measured.items() if figures is not None}
        if not present:
            continue
        defaults = {plan: figures["default"] for plan, figures in present.items()}

        def by_plan(number: Callable[[Figures], Any], of: Mapping[str, Figures] = defaults) -> str:
            return " / ".join(str(number(of[plan])) if plan in of else "-" for plan in PLANS)

        changes = ("transposes", "sums", "channels_first", "fused", "swaps")
        rewritten = {plan: figures["rewritten"] for plan, figures in present.items() if plan != PLANS[0]}
        lines.append(
            [
                net,
                by_plan(lambda figures: sum(figures["transposes"])),
                by_plan(lambda figures: figures["transposes"][1]),
                by_plan(lambda figures: figures["channels_first"]),
                by_plan(lambda figures: figures["fused"]),
                by_plan(lambda figures: figures["sums"][1]),
                ", ".join(plan for plan, figures in present.items() if figures["failure"]) or "none",
                str(sum(_total(figures[name]) for figures in rewritten.values() for name in changes)),
            ]
        )
    return _results.markdown(lines)


def _total(figure: Any) -> int:
    return sum(figure) if isinstance(figure, (list, tuple)) else figure


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"kernels": kernel_table, "layout": layout_table}
"""Functions of the stored results that return a Markdown table, by its name on the pages."""


def run(case: Case) -> Figures:
    """Measure a step in a child process; return its figures, or why it failed."""
    outcome = _child.run_child(
        "benchmarks.gpu_graphs:measure", dataclasses.asdict(case), env={"CUDA_VISIBLE_DEVICES": "-1"}
    )
    if outcome.ok:
        return {**outcome.result, "seconds": round(outcome.seconds, 1)}
    return {"failed": outcome.error["message"] if outcome.error else outcome.how_it_ended()}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks.gpu_graphs", __doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS), metavar="NET")
    parser.add_argument("--plans", nargs="+", choices=(*PLANS, "pipeline"), metavar="PLAN")
    parser.add_argument("--workers", type=_arguments.positive, default=1, help="steps at a time; default: %(default)s")
    default = _results.RESULTS / "gpu_graphs.json"
    parser.add_argument("--results", type=Path, default=default, metavar="FILE", help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the steps whose figures are missing, store and print; return 1 if one failed."""
    options = parse_arguments(arguments)
    chosen = [one for one in cases() if one.net in options.nets and (not options.plans or one.plan in options.plans)]
    stored: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    stored |= _results.provenance("benchmarks.gpu_graphs", arguments)
    writing = threading.Lock()

    def take(case: Case) -> None:
        figures = run(case)
        with writing:
            stored[case.name] = figures
            stored["tables"] = {name: table(stored) for name, table in TABLES.items()}
            options.results.write_text(json.dumps(stored, indent=1) + "\n")
            print(case.name, figures, flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(take, [one for one in chosen if not set(measurements(one)) <= stored.get(one.name, {}).keys()]))
    failed = [one.name for one in chosen if "failed" in stored[one.name]]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} steps measured; {options.results}")
    return 1 if failed else 0


if __name__ == "__main__":
    _child.leave_with(main)
