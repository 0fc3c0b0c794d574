"""Facts about a graph that every pass needs, computed once."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Container, Set

from rewriters.analysis.autodiff_roles import (
    backward_nodes,
    data_dependent_nodes,
    differentiated_gradient_ops,
    forward_derived_nodes,
    hidden_gradients,
    reads_shape_only,
    update_descendants,
    update_nodes,
)
from rewriters.errors import NotTileableError, RewriteError
from rewriters.ir.graph import LOOPS, Graph, Node, Tensor, ancestors
from rewriters.ir.graph_pass import PassError
from rewriters.ir.graph_reader import is_xla_call
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.symbolic_dims import SymbolicDim
from rewriters.rules import catalogue
from rewriters.rules.axis_layouts import Anchor, AxisMap, Layouts
from rewriters.rules.registry import OpView, TileKind, find_rule

__all__: list[str] = []

_ = catalogue  # Importing the package fills the registry.


class GraphAnalysis:
    """Orders, consumers and roles of a canonical graph.

    Attributes:
        graph: The graph; it is not edited.
        level: The topological order γ of each node (`Graph.levels`).
        order: Nodes in topological order.
        position: Index of each node in `order`.
        successors: Nodes that wait for a node's value (not just its shape) or effect.
        consumers: (node, operand position) pairs that read a tensor.
        differentiated: Forward nodes that autodiff created (`differentiated_gradient_ops`).
        backward: Nodes of the backward pass and the update.
        forward_derived: Backward nodes that are computed from forward values alone.
        data: Nodes that depend on data, not on variables alone.
        evaluate: Static evaluator.
    """

    def __init__(
        self,
        graph: Graph,
        backward_scopes: tuple[str, ...] = (),
        forward: Container[str] = (),
        *,
        backward: Set[Node] | None = None,
    ) -> None:
        """Analyse a graph.

        Args:
            graph: A canonical graph.
            backward_scopes: Name scopes that count as backward, as for `backward_nodes`.
            forward: Names of nodes that count as forward, as for `backward_nodes`.
            backward: The backward nodes, if they are known; otherwise they are found.
        """
        self.graph = graph
        self.level = graph.levels()
        self.order = list(self.level)
        self.position = {node: index for index, node in enumerate(self.order)}
        self.successors = self._successors()
        self.consumers = graph.consumers()
        self.differentiated = differentiated_gradient_ops(graph, self.order)
        self.backward = backward_nodes(graph, self.order, backward_scopes, forward, self.differentiated)
        self.forward_derived = forward_derived_nodes(graph, self.order, self.backward)
        self.backward = self.backward | self.forward_derived if backward is None else set(backward)
        self.data = data_dependent_nodes(graph, self.order)
        self.evaluate = StaticEvaluator(graph, self.order)
        self._layouts: Layouts | None = None
        self._views: dict[Node, OpView] = {}

    def _successors(self) -> dict[Node, list[Node]]:
        """Return successors by data and control edges, without reads of a shape: those move to the segment's entry."""
        result: dict[Node, list[Node]] = {node: [] for node in self.order}
        for node in self.order:
            for tensor in () if reads_shape_only(node) else node.inputs:
                result[tensor.node].append(node)
            for before in node.control_inputs:
                result[before].append(node)
        return result

    @property
    def layouts(self) -> Layouts:
        """Axis layouts of images, found when they are first needed: the passes of a swapped step need none."""
        if self._layouts is None:
            self._layouts = Layouts()  # The views of the ops refer to it while it is filled.
            try:
                self._find_layouts(self._layouts)
            except BaseException:
                self._layouts = None
                raise
        return self._layouts

    def _find_layouts(self, layouts: Layouts) -> None:
        self._find_channels(layouts)
        # In a gradient of attention, the axis of queries and that of keys are alike; forward, keys are the channels.
        # So forward ops come first, and backward ops that read their results elementwise come before products.
        anchors: list[Anchor] = []
        links: dict[tuple[bool, bool], list[AxisMap]] = collections.defaultdict(list)
        sequences: list[Tensor] = []
        for node in self.order:
            try:
                rule, view = find_rule(node), self.view(node)
                anchors += rule.anchors(view)
                is_product = node in self.backward and bool(rule.flops(view, 1))
                links[node in self.backward, is_product].extend(rule.links(view))
                sequences += rule.sequences(view)
            except NotTileableError:
                continue  # The node is not tiled.
        for backward in (False, True):
            nodes = (node for node in self.order if (node in self.backward) == backward)
            outputs = (node.out(index) for node in nodes for index in range(len(node.outputs)))
            here = (tensor for tensor in sequences if backward or tensor.node not in self.backward)
            layouts.find(anchors, links[backward, False], ())
            layouts.find(anchors, links[backward, True], outputs, here)
        sizes = self.evaluate.sizes
        samples = (tensor for tensor in self.graph.inputs if tensor.node in self.data and tensor.shape)
        layouts.find_rows(
            samples, lambda one, other: sizes.of(other) != 1 and sizes.are_combined(sizes.of(one), sizes.of(other))
        )

    def _find_channels(self, layouts: Layouts) -> None:
        """Find channel dimensions of operands of normalisations, and of the products that compute these operands."""
        for node in reversed(self.order):
            if node in self.backward or not node.outputs:
                continue
            try:
                rule, view = find_rule(node), self.view(node)
                for tensor, dim in rule.channels(view):
                    layouts.mark_channel(tensor, dim)
                if layouts.channels(node.out()) and not rule.flops(view, 1):
                    layouts.mark_operands(rule.links(view))
            except NotTileableError:
                continue

    def view(self, node: Node) -> OpView:
        """Return a node in the form that rules read."""
        if node not in self._views:
            self._views[node] = OpView(node, self.evaluate, self.layouts, self.graph.device)
        return self._views[node]

    def extents(self, tensor: Tensor) -> tuple[int | None, ...] | None:
        """Return the rows along each axis; `None` for a tensor that holds no image."""
        layout = self.layouts.of(tensor)
        return None if layout is None else layout.extents(tensor)

    def entries_per_image(self, tensor: Tensor) -> int:
        """Return the entries of the first dimension per image: one, except after space-to-batch folding."""
        layout = self.layouts.of(tensor)
        return 1 if layout is None else layout.batch_fold

    def has_known_size(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an image whose shape is static but for the batch size."""
        return self.layouts.of(tensor) is not None and None not in (tensor.shape or ())[1:]

    def is_image(self, tensor: Tensor) -> bool:
        """Return whether a tensor holds images rather than one value for all pixels and images."""
        extents = self.extents(tensor)
        return extents is not None and (any(rows != 1 for rows in extents) or tensor.shape[0] != 1)  # type: ignore[index]

    def is_spatial(self, tensor: Tensor) -> bool:
        """Return whether tiles can split a tensor: an image of more than one pixel or, without images, samples."""
        if not self.has_known_size(tensor):
            return False
        if self.layouts.are_rows:
            return self.is_image(tensor)
        return any(rows != 1 for rows in self.extents(tensor) or ())

    @functools.cached_property
    def constants(self) -> set[Node]:
        """Nodes computed from constants alone."""
        result: set[Node] = set()
        for node in self.order:
            if node.op == "Const" or (node.inputs and not node.stateful and all(t.node in result for t in node.inputs)):
                result.add(node)
        return result

    @functools.cached_property
    def before_backward(self) -> set[Node]:
        """The backward phase and its ancestors."""
        return ancestors(self.backward)

    def sorted(self, nodes: Collection[Node]) -> list[Node]:
        """Return nodes in topological order, so that results do not depend on hashing."""
        return sorted(nodes, key=self.position.__getitem__)

    def mark_roles(self) -> None:
        """Set the roles in the metadata of the ops, in earlier states of the graph too.

        The update includes what it alone reads, such as learning rates, and what depends on it through variables.
        """
        update = update_descendants(self.order, update_nodes(self.graph, self.order, self.backward))
        for node in reversed(self.order):
            readers = self.successors[node]
            if node not in self.backward and readers and not node.stateful and all(r in update for r in readers):
                update.add(node)
            role = "update" if node in update else "backward" if node in self.backward else "forward"
            for graph in (self.graph, *(state.graph for state in self.graph.history)):
                if node.name in graph.nodes:
                    known = graph.nodes[node.name]
                    known.metadata = dataclasses.replace(known.metadata, role=role)

    def require_backward(self) -> None:
        """Raise `RewriteError` for a function that computes no gradients."""
        if not self.backward:
            self.refuse_hidden_gradients()
            raise RewriteError(
                "The step has no backward part: no operation under a `gradient_tape/` or `gradients/` scope. "
                "Pass the function that computes gradients and updates (a training step), not the model's call."
            )

    def refuse_hidden_gradients(self) -> None:
        """Raise `RewriteError` for a function whose only gradients lie in a function body, such as a loop's."""
        node = None if self.backward else hidden_gradients(self.graph, self.order)
        if node is not None:
            body, part = ("loop", "one iteration") if node.op in LOOPS else (f"`{node.op}`", "its function")
            raise RewriteError(
                f"`{node.name}` computes gradients inside of a {body}, where they cannot be rewritten. Rewrite {part} "
                "as a step."
            )


def forward_kinds(analysis: GraphAnalysis, node: Node, inside: set[Node] | None = None) -> list[TileKind]:
    """Return the kinds of the operands of a forward op: `FULL` for images in data positions.

    Raises:
        NotTileableError: If the op has no rule.
    """
    data = find_rule(node).data(analysis.view(node))
    kinds = []
    for position, tensor in enumerate(node.inputs):
        full = (inside is not None and tensor.node in inside) or (position in data and analysis.is_image(tensor))
        kinds.append(TileKind.FULL if full else TileKind.INVARIANT)
    return kinds


def _check_batches(analysis: GraphAnalysis, node: Node, images: list[Tensor]) -> None:
    """Refuse an op on images whose unknown batch sizes may differ: one of them may be broadcast."""
    sizes = analysis.evaluate.sizes
    entries = {analysis.entries_per_image(tensor) for tensor in images}
    if len(entries) > 1:
        return  # Space-to-batch folding, or its inverse.
    numbers = [size for size in map(sizes.of, images) if size != 1]
    if any(isinstance(size, SymbolicDim) for size in numbers):
        if not all(sizes.assume_equal(numbers[0], size) for size in numbers):
            shapes = ", ".join(str(tensor.shape) for tensor in images)
            raise NotTileableError(f"its images ({shapes}) may have different batch sizes at run time")


def check_forward(analysis: GraphAnalysis, node: Node) -> None:
    """Refuse a forward op that cannot run on tiles of forward values.

    Raises:
        NotTileableError: With the reason.
    """
    if is_xla_call(node):
        raise NotTileableError("XLA compiles it as a whole")
    if node.stateful:
        raise NotTileableError("it has side effects or draws random numbers")
    kinds = forward_kinds(analysis, node)
    if TileKind.FULL not in kinds:
        raise NotTileableError("no operand is an image")
    result = find_rule(node).result_kind(analysis.view(node), kinds)
    if result is not TileKind.FULL:
        raise NotTileableError("its result is a sum over tiles")
    images = [tensor for tensor, kind in zip(node.inputs, kinds, strict=True) if kind is TileKind.FULL]
    _check_batches(analysis, node, [*images, node.out()])
    analysis.view(node).check_axes([*images, node.out()])
    for tensor in images:
        if not analysis.has_known_size(tensor):
            raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
    for index in range(len(node.outputs)):
        out = node.out(index)
        if not analysis.has_known_size(out):
            raise NotTileableError(f"its output of shape {out.shape} is not an image of known size")


def require_analysed(graph: Graph, analysis: GraphAnalysis) -> None:
    """Check that an analysis, which a pass was constructed with, is that of the graph that it runs on.

    Raises:
        PassError: If it is the analysis of another graph.
    """
    if analysis.graph is not graph:
        raise PassError("its analysis is that of another graph")
