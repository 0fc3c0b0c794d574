"""Folds windows into images.

Attention in windows (Liu et al., 2021, "Swin Transformer", section 3.2) cuts each image into windows and makes each of
them an image of its own: a reshape joins the batch with the rows and columns of windows. This module rewrites the ops
between such a reshape and the one that undoes it to ops on images of windows, `(batch, rows of windows, columns of
windows, pixels of a window, channels)`, from which tiles can be cut. Heads that are joined with the batch, or with the
tokens as in attention with groups of heads, are separated in the same way.

A region that contains an op without a handler stays as it is, such as the frames of a convolution. They are joined with
the batch, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.canonicalize.window_graph import Region, WindowGraph, Windows
from rewriters.canonicalize.window_ops import HANDLERS
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator

__all__: list[str] = []


def fold_windows_into_images(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace ops on windows of images by ops on images of windows, which tiles can cut."""
    return _WindowFolder(graph, evaluate).run()


class _WindowFolder(WindowGraph):
    """One walk over a graph."""

    def __init__(self, graph: Graph, evaluate: StaticEvaluator) -> None:
        super().__init__(graph, evaluate)
        self._readers: dict[Tensor, list[tuple[Node, int]]] = {}

    def run(self) -> bool:
        """Walk over the graph once, and return whether it changed."""
        self.graph.prune()
        self._readers = readers = self.graph.consumers()
        read = {tensor.node for tensor in (*readers, *self.graph.outputs) if readers.get(tensor, True)}
        for node in self.graph.execution_order():
            if node not in read or (reads_shape_only(node) and node.op != "Shape"):
                continue
            regions = [self.windows[tensor].region for tensor in node.inputs if tensor in self.windows]
            if not regions:
                if node.op == "Reshape" and not node.control_inputs:
                    self._begin(node)
                continue
            for region in regions[1:]:
                regions[0].join(region)
            if not self._rewrite(node):
                regions[0].fail()
        return self._replace()

    def _replace(self) -> bool:
        """Let all ops read the new results, and wait for the new ops; return whether there are any."""
        for tensor in self.graph.outputs:
            if tensor in self.windows:
                self.windows[tensor].region.fail()
        replaced = {
            old: self._as_original(old, new) for old, (new, region) in self.replaced.items() if not region.failed
        }
        nodes = {old: new for old, (new, region) in self.new_nodes.items() if not region.failed}
        for node in self.graph.nodes.values():
            if not nodes.keys().isdisjoint(node.control_inputs):
                node.control_inputs = list(dict.fromkeys(nodes.get(before, before) for before in node.control_inputs))
        self.graph.replace_tensors(replaced)
        self.graph.prune()
        return bool(replaced)

    def _as_original(self, old: Tensor, new: Tensor) -> Tensor:
        """Reshape the image of a window tensor to the shape of the window tensor; other results stay."""
        return self.reshaped(old.node, new, old.shape or ()) if old in self.windows else new

    def _begin(self, node: Node) -> None:
        """Record the window tensor that a reshape returns if it joins the batch or heads with other dimensions."""
        source, out = node.inputs[0], node.out()
        if not source.shape or not out.shape or len(out.shape) < 3:
            return
        if not {None, 0}.isdisjoint((*source.shape[1:], *out.shape[1:])):
            return
        joined = _joined_dims(source.shape[1:], out.shape[1:])  # type: ignore[arg-type]
        # A product reads heads joined with tokens, (batch, key heads, heads * tokens, size). Others stay joined.
        if joined is not None and any(reader.op == "Einsum" for reader, _ in self._readers.get(out, ())):
            self._begin_with(node, source, joined[0] + 1, joined[1])
            return
        entries = math.prod(out.shape[1:])  # type: ignore[arg-type]
        for last in range(1, len(source.shape)):
            run, window = source.shape[1 : last + 1], source.shape[last + 1 :]
            if math.prod(window) == entries and math.prod(run) > 1:  # type: ignore[arg-type]
                image = self.reshaped(node, source, (source.shape[0], *run, *out.shape[1:]))
                self._begin_with(node, image, 0, last + 1)
                return

    def _begin_with(self, node: Node, image: Tensor, dim: int, joined: int) -> None:
        windows = Windows(image, dim, joined, self.evaluate.sizes.of(node.inputs[0]), Region())
        self.windows[node.out()], self.new_nodes[node] = windows, (image.node, windows.region)

    def _rewrite(self, node: Node) -> bool:
        """Add the op on images in place of an op on window tensors; return whether there is one."""
        handler = HANDLERS.get(node.op)
        results = map(node.out, range(len(node.outputs)))
        if handler is None or any(tensor.shape is None for tensor in (*node.inputs, *results)):
            return False
        try:
            return handler(self, node)
        except NotTileableError:  # Of a slice with unknown bounds.
            return False


def _joined_dims(have: Sequence[int], want: Sequence[int]) -> tuple[int, int] | None:
    """Return the first of the dimensions that a reshape joins, and their number.

    Returns:
        `None` for a reshape that changes other dimensions, too, or joins the last dimension.
    """
    number = len(have) - len(want) + 1
    for first in range(len(want) - 1):
        last = first + number
        joined = have[first:last]
        same = have[:first] == want[:first] and have[last:] == want[first + 1 :]
        if same and number > 1 and min(joined) > 1 and math.prod(joined) == want[first]:
            return first, number
    return None
