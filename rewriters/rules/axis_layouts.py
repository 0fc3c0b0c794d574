"""Axis layouts: the dimensions of each tensor that hold the axes along which tiles are cut.

An image has two or three axes. A tensor that holds one has a dimension for each of them: `(batch, height, width,
channels)`, or channels first, or `(batch, height, width, groups, channels)` inside a group normalisation. A sequence is
an image of one row, of which `(batch, steps, channels)` holds only the other axis.

Convolutions and pools fix the dimensions of the axes. From there they are propagated through the graph, in both
directions, along the `links` of the rules. A layout decides how tiles are cut and never changes the computation: a rule
that does not support the layouts of its operands refuses.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from rewriters.ir.graph import Tensor

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of a tensor whose first dimension is the batch.

    Attributes:
        dims: Dimension of each axis; `None` for an axis of one row without a dimension.
        batch_fold: Entries of the first dimension per image: more than one after space-to-batch folding.
    """

    dims: tuple[int | None, ...]
    batch_fold: int = 1

    def extents(self, tensor: Tensor) -> tuple[int | None, ...]:
        """Return the rows along each axis."""
        assert tensor.shape is not None
        return tuple(1 if dim is None else tensor.shape[dim] for dim in self.dims)

    def extent(self, tensor: Tensor, axis: int) -> int | None:
        """Return the rows along an axis; `None` if unknown."""
        assert tensor.shape is not None
        dim = self.dims[axis]
        return 1 if dim is None else tensor.shape[dim]

    def others(self, rank: int) -> list[int]:
        """Return the dimensions that are neither batch nor axes: channels."""
        return [dim for dim in range(1, rank) if dim not in self.dims]


@dataclasses.dataclass(frozen=True)
class AxisMap:
    """Correspondence of the dimensions of two tensors.

    Attributes:
        source: One tensor.
        target: The other tensor.
        moves: Dimensions of `target` by dimensions of `source`; the first dimension maps to the first.
        entries: Entries of the first dimension of `target` per entry of that of `source`.
    """

    source: Tensor
    target: Tensor
    moves: Mapping[int, int]
    entries: Fraction = Fraction(1)

    def reversed(self) -> AxisMap:
        """Return the map from the target to the source."""
        return AxisMap(self.target, self.source, {new: old for old, new in self.moves.items()}, 1 / self.entries)


Anchor = tuple[Tensor, tuple[int, ...]]
"""A tensor, and the dimensions of its axes that an operation fixes."""


class Layouts:
    """Layouts of all tensors that may hold images."""

    are_rows: bool = False
    """Whether the step has no images, and each sample of a batch counts as an image of one pixel."""

    def __init__(self) -> None:
        self._layouts: dict[Tensor, Layout] = {}
        self._links: dict[Tensor, list[AxisMap]] = {}
        self._channels: dict[Tensor, set[int]] = {}

    def mark_channel(self, tensor: Tensor, dim: int) -> None:
        """Record a channel dimension of a tensor."""
        self._channels.setdefault(tensor, set()).add(dim)

    def mark_operands(self, links: Iterable[AxisMap]) -> None:
        """Record the dimensions of operands, the sources of links, that are dimensions of channels in the result."""
        for link in links:
            for dim, moved in link.moves.items():
                if moved in self._channels.get(link.target, ()):
                    self.mark_channel(link.source, dim)

    def channels(self, tensor: Tensor) -> set[int]:
        """Return the recorded channel dimensions of a tensor."""
        return self._channels.get(tensor, set())

    def of(self, tensor: Tensor) -> Layout | None:
        """Return the layout; `None` for a tensor that holds no image."""
        return self._layouts.get(tensor)

    def lacking(self, axes: int) -> list[int]:
        """Return the axes, of `number`, that some tensor lacks."""
        dims = [layout.dims for layout in self._layouts.values() if len(layout.dims) == axes]
        return [axis for axis in range(axes) if any(known[axis] is None for known in dims)]

    def find(
        self,
        anchors: Iterable[Anchor],
        links: Iterable[AxisMap],
        tensors: Iterable[Tensor],
        sequences: Iterable[Tensor] = (),
    ) -> None:
        """Propagate layouts, those of earlier calls too, which stay as they are.

        Args:
            anchors: Known layouts; of two for a tensor the first counts.
            links: Axis maps along which layouts are propagated.
            tensors: Tensors with four or five dimensions that no anchor and no sequence reaches are assumed to be
                images with channels last.
            sequences: Tensors that are sequences, `(batch, steps, channels)`, unless an anchor reaches them.
        """
        for link in links:
            self._links.setdefault(link.source, []).append(link)
            self._links.setdefault(link.target, []).append(link.reversed())
        first = dict(self._layouts)
        for tensor, dims in anchors:
            first.setdefault(tensor, Layout(dims))
        self._spread(first)
        axes = max((len(layout.dims) for layout in self._layouts.values()), default=2)
        for tensor in sequences:
            if tensor not in self._layouts:
                self._spread({tensor: Layout((None,) * (axes - 1) + (1,))})
        for tensor in tensors:
            if tensor not in self._layouts and tensor.shape is not None and len(tensor.shape) in (4, 5):
                self._spread({tensor: Layout(tuple(range(1, len(tensor.shape) - 1)))})
        self._count_entries()

    def find_rows(self, samples: Iterable[Tensor], have_same_size: Callable[[Tensor, Tensor], bool]) -> None:
        """Treat samples as images of one pixel if the step has no images.

        Args:
            samples: Tensors whose first dimension is the batch.
            have_same_size: Whether two tensors have the same first dimension. Layouts are propagated along the links
                of earlier calls between such tensors alone.
        """
        self.are_rows = not self._layouts
        waiting = deque(samples if self.are_rows else ())
        while waiting:
            tensor = waiting.popleft()
            if tensor in self._layouts:
                continue
            self._layouts[tensor] = Layout((None, None))
            links = self._links.get(tensor, ())
            waiting.extend(link.target for link in links if link.entries == 1 and have_same_size(tensor, link.target))

    def _spread(self, new: Mapping[Tensor, Layout]) -> None:
        self._layouts.update(new)
        waiting = deque(new)
        while waiting:
            for link in self._links.get(waiting.popleft(), ()):
                if link.target not in self._layouts and (layout := self._moved(link)) is not None:
                    self._layouts[link.target] = layout
                    waiting.append(link.target)

    def _moved(self, link: AxisMap) -> Layout | None:
        """Return the layout of a link's target.

        Returns:
            `None` if an axis of more than one row is lost, or none is left. The source may be one value for all pixels,
            such as a scale; of a target with more rows it does not know the axes.
        """
        shape, dims = link.source.shape, self._layouts[link.source].dims
        assert shape is not None
        moved = tuple(None if dim is None else link.moves.get(dim) for dim in dims)
        is_one_value = all(dim is None or shape[dim] == 1 for dim in dims)
        if is_one_value and any(dim is not None and (link.target.shape or ())[dim] != 1 for dim in moved):
            return None
        lost = [dim for dim, new in zip(dims, moved, strict=True) if dim is not None and new is None]
        return None if any(shape[dim] != 1 for dim in lost) or not any(moved) else Layout(moved)

    def _count_entries(self) -> None:
        """Propagate space-to-batch factors, starting from one entry per image."""
        counts = {t: Fraction(1) for t, links in self._links.items() if any(li.entries > 1 for li in links)}
        waiting = deque(counts)
        while waiting:
            source = waiting.popleft()
            for link in self._links[source]:
                if link.target not in counts:
                    counts[link.target] = counts[source] * link.entries
                    waiting.append(link.target)
        for tensor, count in counts.items():
            if tensor in self._layouts:
                self._layouts[tensor] = dataclasses.replace(self._layouts[tensor], batch_fold=max(int(count), 1))
