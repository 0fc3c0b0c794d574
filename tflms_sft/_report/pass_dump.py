"""Files with the graph of a step after each pass, and a summary of what each pass changed.

`TFLMS_SFT_DUMP` names a directory, in which each rewriting of a step has a folder of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rewriters.ir.graph import Graph, GraphState
from rewriters.ir.graph_pass import dump_directory
from rewriters.ir.text import graph_text, op_line
from tflms_sft._report.plan import Plan

SUMMARY = "summary.txt"

MAX_TYPES = 6
"""Op types of which the summary gives the number of new and of removed ops."""

MAX_EXAMPLES = 3
"""Changed ops that the summary shows for each pass."""


def write_dump(graph: Graph, plan: Plan) -> Path | None:
    """Write the history of a rewritten graph to a new folder; return the folder, `None` if no dump is requested."""
    if not dump_directory():
        return None
    parent = Path(dump_directory())
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[5:]) for path in parent.glob("step-[0-9]*")), default=0)
    folder = parent / f"step-{number:02d}"
    folder.mkdir()
    states = graph.history
    for number, state in enumerate(states):
        (folder / file_name(number, state)).write_text(graph_text(state.graph), encoding="utf-8")
    (folder / SUMMARY).write_text("\n".join(_summary(states, plan)) + "\n", encoding="utf-8")
    return folder


def file_name(number: int, state: GraphState) -> str:
    """Return the name of the file with the graph after a pass."""
    return f"{number:02d}-{state.title}.txt"


def _summary(states: Sequence[GraphState], plan: Plan) -> Iterator[str]:
    """Yield the lines of the summary."""
    yield plan.summary()
    yield ""
    yield "Ops after each pass, ops that it added and removed, ops with other operands, types or devices, and control"
    yield "edges that it added and removed between ops that stay:"
    yield ""
    yield f"{'pass':36} {'ops':>6} {'added':>6} {'removed':>7} {'changed':>7} {'edges':>12}"
    changes = [_Changes(before.graph, after.graph) for before, after in zip(states, states[1:], strict=False)]
    for number, state in enumerate(states):
        name = file_name(number, state).removesuffix(".txt")
        counts = changes[number - 1].counts() if number else ""
        yield f"{name:36} {len(state.graph.nodes):6} {counts}".rstrip()
    for number, (state, change) in enumerate(zip(states[1:], changes, strict=True), 1):
        yield ""
        yield f"{file_name(number, state).removesuffix('.txt')}: {state.purpose}"
        yield from change.examples()


class _Changes:
    """Differences between the graphs before and after a pass."""

    def __init__(self, before: Graph, after: Graph) -> None:
        old, new = before.nodes, after.nodes
        self.added = [node for name, node in new.items() if name not in old]
        self.removed = [node for name, node in old.items() if name not in new]
        kept = [(old[name], node) for name, node in new.items() if name in old]
        waits = [
            ({before.name for before in node.control_inputs}, {before.name for before in other.control_inputs})
            for other, node in kept
        ]
        self.new_edges = sum(len(now - earlier) for now, earlier in waits)
        self.old_edges = sum(len(earlier - now) for now, earlier in waits)
        self.waiting = [node for (_, node), (now, earlier) in zip(kept, waits, strict=True) if now - earlier]
        self.changed = [(other, node) for other, node in kept if op_line(other) != op_line(node)]

    def counts(self) -> str:
        """Return the columns of the table."""
        edges = f"+{self.new_edges} -{self.old_edges}"
        return f"{len(self.added):6} {len(self.removed):7} {len(self.changed):7} {edges:>12}"

    def examples(self) -> Iterator[str]:
        """Yield lines with types of new and removed ops, and some changed ops before and after."""
        for title, nodes in (("added", self.added), ("removed", self.removed)):
            if nodes:
                yield f"  {title}: {_types(node.op for node in nodes)}"
        for node in self.added[:MAX_EXAMPLES]:
            yield f"  + {op_line(node)}"
        for other, node in self.changed[:MAX_EXAMPLES]:
            yield f"  - {op_line(other)}"
            yield f"  + {op_line(node)}"


def _types(ops: Iterable[str]) -> str:
    counts = collections.Counter(ops).most_common()
    shown = [f"{count} {op}" for op, count in counts[:MAX_TYPES]]
    others = sum(count for _, count in counts[MAX_TYPES:])
    return ", ".join([*shown, *([f"{others} others"] if others else [])])
