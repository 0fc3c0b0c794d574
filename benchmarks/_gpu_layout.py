"""What TensorFlow's graph optimizers do to the steps of 12 networks on a GPU, without one.

    python -m benchmarks._gpu_layout [--nets NET ...] [--workers 2] [--results FILE]

Steps are planned for an H200 and rewritten in processes of their own; a run that was interrupted goes on with the steps
that are missing. The GPU of the optimizers has 5 % more memory than the plan needs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child, _gpu_checks, _results
from benchmarks.gpu import NETWORKS

CARD = "h200"
BATCH, IMAGE_SIZE, VOLUME_SIZE = 2, 96, 32
PLANS = ("original", "tiles", "swaps", "strips")
"""Plans of every network; strips carry their halo rows."""
MEMORY_RATIO = 1.05
"""Memory of the GPU per predicted peak."""
MIB = 2**20

Figures = dict[str, Any]


def measure(*, net: str, plan: str, emit: _child.Emit) -> Figures:
    """Rewrite a step for a GPU and return the figures of the graph optimizers."""
    del emit
    import tflms_sft
    from benchmarks import _graph_optimizers
    from rewriters.device.cards import CARDS, planning_for

    task = _gpu_checks._task(net)
    size = VOLUME_SIZE if task.dimensions == 3 else IMAGE_SIZE
    step = _gpu_checks._step(task, size, BATCH, "float32")
    params = {
        "original": tflms_sft.SFTParams(),
        "tiles": tflms_sft.SFTParams(num_tiles=(2,) * task.dimensions),
        "strips": tflms_sft.SFTParams(num_tiles=(4,) + (1,) * (task.dimensions - 1), halo="carry"),
        "swaps": tflms_sft.LMSParams(tier="host", n_tensors=8, min_bytes=1),
    }
    with planning_for(CARDS[CARD]):
        if plan == "original":
            function, peak = step.get_concrete_function(), None
        else:
            rewritten = tflms_sft.rewrite(step, params[plan])
            function, peak = rewritten.concrete_function, rewritten.plan.predicted.peak_bytes
        memory = None if peak is None else int(MEMORY_RATIO * peak)
        return {"peak_bytes": peak, **_graph_optimizers.layout_figures(function, CARDS[CARD], memory)}


def layout_table(stored: Mapping[str, Any]) -> str:
    """Return the Markdown table, one line for each network and plan; pairs are main graph / bodies of loops."""
    lines = [
        [
            "network",
            "plan",
            "transposes by default",
            "static MiB",
            "channels first",
            "fused",
            "swaps",
            "sums",
            "layout",
            "for rewritten steps",
        ]
    ]
    for net in NETWORKS:
        for plan in PLANS:
            figures = stored.get(f"{net}/{plan}", {})
            if "default" not in figures:
                continue
            default, rewritten = figures["default"], figures["rewritten"]
            changes = ("transposes", "sums", "channels_first", "fused", "swaps")
            lines.append(
                [
                    net,
                    plan,
                    "{} / {}".format(*default["transposes"]),
                    "{:.0f} / {:.0f}".format(*(size / MIB for size in default["transposed_bytes"])),
                    f"{default['channels_first']} of {default['convolutions']}",
                    str(default["fused"]),
                    str(default["swaps"]),
                    "{} / {}".format(*default["sums"]),
                    "fails" if figures["failure"] else "changes",
                    str(sum(_total(rewritten[name]) for name in changes)) if plan != "original" else "-",
                ]
            )
    return _results.markdown(lines)


def _total(figure: Any) -> int:
    return sum(figure) if isinstance(figure, (list, tuple)) else figure


def run(net: str, plan: str) -> Figures:
    """Measure a step in a child process; return its figures, or why it failed."""
    outcome = _child.run_child("benchmarks._gpu_layout:measure", {"net": net, "plan": plan})
    if outcome.ok:
        return {**outcome.result, "seconds": round(outcome.seconds, 1)}
    return {"failed": outcome.error["message"] if outcome.error else outcome.how_it_ended()}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("benchmarks._gpu_layout", __doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETWORKS), default=tuple(NETWORKS), metavar="NET")
    parser.add_argument("--workers", type=_arguments.positive, default=1, help="steps at a time; default: %(default)s")
    default = _results.RESULTS / "gpu_layout.json"
    parser.add_argument("--results", type=Path, default=default, metavar="FILE", help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the steps whose figures are missing, store and print; return 1 if one failed."""
    options = parse_arguments(arguments)
    chosen = [(net, plan) for plan in PLANS for net in options.nets]
    stored: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    stored |= _results.provenance("benchmarks._gpu_layout", arguments)
    writing = threading.Lock()

    def take(net: str, plan: str) -> None:
        figures = run(net, plan)
        with writing:
            stored[f"{net}/{plan}"] = figures
            stored["tables"] = {"layout": layout_table(stored)}
            options.results.write_text(json.dumps(stored, indent=1) + "\n")
            print(net, plan, figures, flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        missing = [(net, plan) for net, plan in chosen if "default" not in stored.get(f"{net}/{plan}", {})]
        list(pool.map(lambda pair: take(*pair), missing))
    failed = [(net, plan) for net, plan in chosen if "failed" in stored[f"{net}/{plan}"]]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} steps measured; {options.results}")
    return 1 if failed else 0


if __name__ == "__main__":
    _child.leave_with(main)
