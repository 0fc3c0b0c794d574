"""Files with the graph of a step after each pass, and a summary of what each pass changed.

`TFLMS_SFT_DUMP` names a directory, in which each rewriting of a step has a folder of its own.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rewriters.emission.loop_tensors import loop_operand
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.ir.graph import Graph, GraphState, Node, Tensor
from rewriters.ir.graph_pass import dump_directory
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.text import graph_text, op_line, shape_text
from tflms_sft._report.plan import Plan
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened

SUMMARY = "summary.txt"

MAX_TYPES = 6
"""Op types of which the summary gives the number of new and of removed ops."""

MAX_EXAMPLES = 4
"""Patterns of new, removed and changed ops, each, of which the summary shows an example."""

MAX_NAMES = 6
"""Names in a list of the summary."""

_NAMED_BY_PURPOSE = ops_with(Trait.PYTHON_CALL) | {"NoOp"}
"""Op types that do not tell what an op does: its name does."""

_LEGEND = """\
Columns: ops, with constants, which the files show in the place of operands; ops that the pass added and removed; ops
with other operands, types or devices; control edges added and removed between ops that stay; predicted peak. The lines
below show one example of each frequent pattern, with the number of such ops. A grid such as 4x1 has 4 groups of rows
and 1 of columns; 2x4x1 has 2 groups of images, too. Scopes: sft/ for tile loops, which are listed at the end, lms/ for
swaps, micro_0/ for a micro-batch, pipeline/ for the slots of a schedule. Peaks include variables."""


def write_dump(
    graph: Graph,
    plan: Plan,
    segments: Sequence[SegmentPlan] = (),
    peak_bytes: Callable[[Graph], int | None] | None = None,
) -> Path | None:
    """Write the history of a rewritten graph to a new folder; return the folder, `None` if no dump is requested.

    Args:
        graph: The rewritten graph.
        plan: Its plan.
        segments: Segments that run in tile loops.
        peak_bytes: Predicts the peak of a graph of the history; `None` for a graph that it has no model for.
    """
    states, directory = graph.history, dump_directory()
    if not directory:
        return None
    peaks = [None if peak_bytes is None else peak_bytes(state.graph) for state in states[:-1]]
    peaks += [plan.predicted.peak_bytes for _ in states[-1:]]
    try:
        folder = _new_folder(Path(directory))
        for number, state in enumerate(states):
            (folder / file_name(number, state)).write_text(graph_text(state.graph), encoding="utf-8")
        text = "\n".join((plan.summary(), "", *_summary(states, peaks), *_tile_loops(segments), ""))
        (folder / SUMMARY).write_text(text, encoding="utf-8")
    except OSError as error:  # The step itself is rewritten.
        warnings.warn(f"tflms-sft: the passes cannot be written to {directory!r}: {error}", stacklevel=2)
        return None
    return folder


def _new_folder(parent: Path) -> Path:
    """Make and return the folder `step-NN` with the first number from 1 on that is free."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = parent / f"step-{number:02d}"
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def file_name(number: int, state: GraphState) -> str:
    """Return the name of the file with the graph after a pass."""
    return f"{number:02d}-{state.title}.txt"


def _summary(states: Sequence[GraphState], peaks: Sequence[int | None]) -> Iterator[str]:
    """Yield the table of passes, and examples of what each of them changed."""
    changes = [_Changes(before.graph, after.graph) for before, after in zip(states, states[1:], strict=False)]
    names = [file_name(number, state).removesuffix(".txt") for number, state in enumerate(states)]
    yield f"{'pass':32} {'ops':>6} {'added':>6} {'removed':>7} {'changed':>7} {'edges':>12} {'peak':>9}"
    for number, (name, state, peak) in enumerate(zip(names, states, peaks, strict=True)):
        counts = changes[number - 1].counts() if number else " " * 35
        shown = "" if peak is None else format_bytes(peak)
        yield f"{name:32} {len(state.graph.nodes):6} {counts} {shown:>9}".rstrip()
    yield ""
    yield _LEGEND
    for name, state, change in zip(names[1:], states[1:], changes, strict=True):
        yield ""
        yield f"{name}: {state.purpose}"
        yield from change.examples()


def _tile_loops(segments: Sequence[SegmentPlan]) -> Iterator[str]:
    """Yield what each tile loop runs, reads and returns."""
    if segments:
        yield from ("", "Tile loops, in the order of each segment:")
    for planned in segments:
        done: set[Node] = set()
        for loop in planned.loops:
            recomputed = len(done.intersection(loop.body))
            again = f", of which {recomputed} run again" if recomputed else ""
            done.update(loop.body)
            yield f"  {planned.segment.name}/{loop.name} runs {len(loop.body)} ops in each of {loop.grid} tiles{again}"
            whole = {*loop.invariants}
            for what, tensors in (
                ("reads its part of", [tensor for tensor in loop.reads if tensor not in whole]),
                ("reads all of", loop.invariants),
                ("receives rows from the tile before of", loop.carries),
                ("writes its part of", loop.writes),
                ("adds to a part of", loop.accumulates),
                ("adds to all of", loop.reductions),
            ):
                if tensors:
                    yield f"    each tile {what} {_named(map(loop_operand, tensors))}"


def _named(tensors: Iterable[Tensor]) -> str:
    """Return names and types of tensors, cut short."""
    texts = [f"{tensor.name.removesuffix(':0')} {tensor.dtype.name}{shape_text(tensor.shape)}" for tensor in tensors]
    return shortened(texts, MAX_NAMES)


class _Changes:
    """Differences between the graphs before and after a pass."""

    def __init__(self, before: Graph, after: Graph) -> None:
        old, new = before.nodes, after.nodes
        self.added = [node for name, node in new.items() if name not in old]
        self.removed = [node for name, node in old.items() if name not in new]
        common = [(old[name], node) for name, node in new.items() if name in old]
        waits = [
            ({before.name for before in node.control_inputs}, {before.name for before in other.control_inputs})
            for other, node in common
        ]
        self.new_edges = sum(len(now - earlier) for now, earlier in waits)
        self.old_edges = sum(len(earlier - now) for now, earlier in waits)
        self.changed = [(other, node) for other, node in common if op_line(other) != op_line(node)]

    def counts(self) -> str:
        """Return the columns of the table."""
        edges = f"+{self.new_edges} -{self.old_edges}"
        return f"{len(self.added):6} {len(self.removed):7} {len(self.changed):7} {edges:>12}"

    def examples(self) -> Iterator[str]:
        """Yield types of new and removed ops, and an example of each pattern of new, removed and changed ops."""
        for title, nodes in (("added", self.added), ("removed", self.removed)):
            if nodes:
                yield f"  {title}: {_types(node.op for node in nodes)}"
        for old, new, count in (
            *_patterns([(node, None) for node in self.removed]),
            *_patterns([(None, node) for node in self.added]),
            *_patterns(self.changed),
        ):
            number = f"  x{count}" if count > 1 else ""
            if old and new and op_line(old, with_edges=False) == op_line(new, with_edges=False):
                yield f"  ~ {new.name} ({new.op}): {_edge_changes(old, new)}{number}"
                continue
            if old is not None:
                yield f"  - {op_line(old)}{'' if new else number}"
            if new is not None:
                yield f"  + {op_line(new)}{number}"


def _edge_changes(old: Node, new: Node) -> str:
    """Return the control inputs that an op has gained and lost."""
    before, after = ({other.name for other in node.control_inputs} for node in (old, new))
    texts = [f"waits for {shortened(sorted(after - before), MAX_NAMES)}"] if after - before else []
    texts += [f"no longer waits for {shortened(sorted(before - after), MAX_NAMES)}"] if before - after else []
    return ", ".join(texts)


def _patterns(
    pairs: Sequence[tuple[Node | None, Node | None]],
) -> Iterator[tuple[Node | None, Node | None, int]]:
    """Yield the first pair of an op before and after for each of the most frequent kinds, and the number of them."""
    groups: dict[str, list[tuple[Node | None, Node | None]]] = {}
    for old, new in pairs:
        node = new or old
        assert node is not None
        purpose = re.sub(r"_?\d+$", "", node.name.rpartition("/")[2])
        kind = purpose if node.op in _NAMED_BY_PURPOSE else node.op
        groups.setdefault(kind, []).append((old, new))
    for group in sorted(groups.values(), key=len, reverse=True)[:MAX_EXAMPLES]:
        yield (*group[0], len(group))


def _types(ops: Iterable[str]) -> str:
    counts = collections.Counter(ops).most_common()
    shown = [f"{count} {op}" for op, count in counts[:MAX_TYPES]]
    others = sum(count for _, count in counts[MAX_TYPES:])
    return ", ".join([*shown, *([f"{others} others"] if others else [])])
