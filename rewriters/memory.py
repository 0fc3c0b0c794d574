"""How many bytes are alive at the worst moment of a step.

Liveness over the graph, in the order of an executor that runs what is ready first, with known shapes: a tensor is
allocated when its op runs and freed after its last reader. Ops that pass their
operand on or may overwrite it allocate nothing, as in TensorFlow. A tile loop is one
op whose scratch is the peak of a turn of its body over the largest tile. What
the model does not know is which order the executor takes among ready ops
and what kernels allocate inside; the measured peak is reported beside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rewriters import device
from rewriters.graph import Graph, Node, Tensor
from rewriters.tiles import Phase

__all__: list[str] = []

_ALIAS = frozenset(
    "Identity IdentityN Reshape Squeeze ExpandDims StopGradient PreventGradient Snapshot Bitcast EnsureShape".split()
)
_IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd Cast Ceil ClipByValue Cos Div DivNoNan Elu EluGrad Erf Erfc Exp Expm1 Floor LeakyRelu "
    "LeakyReluGrad Log Log1p Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal Relu Relu6 Relu6Grad ReluGrad "
    "Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Softplus SoftplusGrad Softsign "
    "SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Sub Tanh TanhGrad".split()
)
_NO_BYTES = frozenset(["Placeholder", "Const", "ReadVariableOp", "VarHandleOp", "Empty", "NoOp"])
"""Ops whose outputs exist anyway (arguments, weights) or are counted elsewhere (a loop's buffers)."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The worst moment.

    Attributes:
        peak_bytes: Bytes alive, fixed ones included.
        at: Name of the op that runs then.
        largest: (name, bytes) of the biggest tensors alive, biggest first.
        timeline: (op name, bytes alive while it runs), in order.
    """

    peak_bytes: int
    at: str
    largest: tuple[tuple[str, int], ...]
    timeline: tuple[tuple[str, int], ...]


def liveness(
    order: Sequence[Node],
    num_bytes: Callable[[Tensor], int],
    scratch: Mapping[Node, int],
    keep: Iterable[Tensor] = (),
    fixed_bytes: int = 0,
) -> Peak:
    """Simulate an order of ops.

    Args:
        order: Ops in the order they run.
        num_bytes: Bytes of a tensor.
        scratch: Bytes that an op needs only while it runs.
        keep: Tensors that are never freed.
        fixed_bytes: Bytes alive throughout.
    """
    buffer: dict[Tensor, int] = {}
    owners: dict[int, str] = {}
    uses: dict[int, int] = {}
    size: dict[int, int] = {}
    reads: dict[Tensor, int] = {}
    for node in order:
        for tensor in node.inputs:
            reads[tensor] = reads.get(tensor, 0) + 1
    for tensor in keep:
        reads[tensor] = reads.get(tensor, 0) + 1
    alive = fixed_bytes
    best: tuple[int, str, dict[int, int]] = (alive, "", {})
    timeline = []
    for number, node in enumerate(order):
        reusable = _reusable(node, buffer, uses, num_bytes)
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            count = reads.get(tensor, 0)
            source = node.inputs[0] if node.inputs else None
            if node.op in _ALIAS and source in buffer and len(node.outputs) == 1:
                buffer[tensor] = buffer[source]
                uses[buffer[tensor]] += count
                continue
            if reusable is not None and num_bytes(tensor) == size[reusable]:
                buffer[tensor] = reusable
                uses[reusable] += count
                owners[reusable] = tensor.name
                reusable = None
                continue
            key = number * 64 + index
            silent = node.op in _NO_BYTES or (not count and node.op.endswith("While"))
            buffer[tensor], uses[key] = key, count
            size[key] = 0 if silent else num_bytes(tensor)
            owners[key] = tensor.name
            alive += size[key]
        now = alive + scratch.get(node, 0)
        if node.op not in _NO_BYTES:
            timeline.append((node.name, now))
        if now > best[0]:
            best = (now, node.name, {k: b for k, b in size.items() if b})
        for tensor in node.inputs:
            if tensor in buffer:
                uses[buffer[tensor]] -= 1
        for tensor in (*node.inputs, *(node.out(i) for i in range(len(node.outputs)))):
            key = buffer.get(tensor, -1)
            if key in size and uses[key] <= 0:
                alive -= size.pop(key)
    largest = sorted(((owners[k], b) for k, b in best[2].items()), key=lambda item: -item[1])[:10]
    return Peak(best[0], best[1], tuple(largest), tuple(timeline))


def _reusable(
    node: Node, buffer: Mapping[Tensor, int], uses: Mapping[int, int], num_bytes: Callable[[Tensor], int]
) -> int | None:
    """Buffer of an operand that ends here and that the op may overwrite."""
    if node.op not in _IN_PLACE:
        return None
    wanted = num_bytes(node.out())
    for tensor in node.inputs:
        key = buffer.get(tensor)
        if key is not None and uses.get(key) == node.inputs.count(tensor) and num_bytes(tensor) == wanted:
            if tensor.node.op not in _NO_BYTES:
                return key
    return None


def graph_peak(graph: Graph, scratch: Mapping[str, int], batch: int, fixed_bytes: int) -> Peak:
    """Peak of a whole graph; `scratch` by op name (tile loops)."""
    order = graph.execution_order()
    named = _together({node: device.kernel_scratch(node, _small_pixels(node)) for node in order})
    named.update({graph.nodes[name]: amount for name, amount in scratch.items() if name in graph.nodes})
    arguments = sum(t.num_bytes(batch) for t in graph.inputs)
    return liveness(order, lambda t: t.num_bytes(batch), named, graph.outputs, fixed_bytes + arguments)


def _together(scratch: Mapping[Node, int]) -> dict[Node, int]:
    """Both gradients of a convolution wait for the same tensor, so they run, and allocate, at once."""
    groups: dict[Tensor, int] = {}
    for node, amount in scratch.items():
        if amount and len(node.inputs) > 1:
            groups[node.inputs[-1]] = groups.get(node.inputs[-1], 0) + amount
    return {
        node: groups[node.inputs[-1]] if amount and len(node.inputs) > 1 else amount
        for node, amount in scratch.items()
    }


def _small_pixels(node: Node) -> int:
    """Rows times columns of the operand with one pixel per window, of a gradient of a convolution."""
    if len(node.inputs) != 3:
        return 0
    shape = node.inputs[2].shape
    return 0 if shape is None or len(shape) != 4 else int(shape[1] or 0) * int(shape[2] or 0)


def tile_bytes(phase: Phase, tensor: Tensor, batch: int) -> int:
    """Bytes of a tensor in the largest tile of a phase."""
    region = phase.regions.get(tensor)
    if region is None or tensor.shape is None:
        return tensor.num_bytes(batch)
    per_tile = -(-batch // min(phase.grid.batch, batch))
    rows, columns = (int(interval.size.max()) for interval in region)
    leading = per_tile if tensor.shape[0] != 1 else 1
    return leading * rows * columns * int(tensor.shape[3] or 1) * tensor.dtype.size


@functools.lru_cache(maxsize=128)
def phase_scratch(phase: Phase, batch: int) -> int:
    """Peak bytes of one turn of a loop, its buffers and whole operands not counted."""
    sliced = [_Slice(tensor) for tensor in phase.reads]
    stand_in = {s.tensor: s.node.out() for s in sliced}
    body: list[Node] = []
    scratch: dict[Node, int] = {}
    sizes: dict[Tensor, int] = {s.node.out(): tile_bytes(phase, s.tensor, batch) for s in sliced}
    renamed: dict[Tensor, Tensor] = dict(stand_in)
    for node in phase.body:
        inputs = [renamed[t] for t in node.inputs if t in renamed]
        copy = Node(node.name, node.op, inputs, (), {}, "", node.outputs)
        body.append(copy)
        needs = [plan.needs[2] for plan in phase.plans[node] if len(plan.needs) == 3]
        pixels = math.prod(int(need.size.max()) for need in needs if need is not None) if needs else 0
        scratch[copy] = device.kernel_scratch(node, pixels)
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            if tensor not in stand_in:
                renamed[tensor] = copy.out(index)
                sizes[copy.out(index)] = tile_bytes(phase, tensor, batch)
    ends = [renamed[t] for t in (*phase.writes, *phase.accumulates) if t in renamed]
    # Slices are made when first needed, as the executor would once their op is ready.
    order = _lazily(body, {s.node.out(): s.node for s in sliced})
    return liveness(order, lambda t: sizes.get(t, 0), _together(scratch), ends).peak_bytes


class _Slice:
    """Stand-in for the op that cuts a whole tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.node = Node(f"slice/{tensor.name}", "StridedSlice", (), (), {}, "", [tensor.node.outputs[tensor.index]])


def _lazily(body: Sequence[Node], sources: Mapping[Tensor, Node]) -> list[Node]:
    placed: set[Node] = set()
    order: list[Node] = []
    for node in body:
        for tensor in node.inputs:
            source = sources.get(tensor)
            if source is not None and source not in placed:
                placed.add(source)
                order.append(source)
        order.append(node)
    return order
