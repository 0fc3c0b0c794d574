"""Parts of an image for each device, for networks without padding: which sizes go, which borders they need.

Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP '20, train U-Nets on images that no device can
hold: without padding a network makes the middle of an image, and only its surroundings of ε pixels matter to it. So an
image is cut into tiles that overlap, each is trained as an image of its own, and devices exchange nothing but gradients
(section 4, "sample parallel"). This module has their formulas for the U-Nets that they describe (`Architecture`), and
`sample_tiling`, which finds the same out for any Keras model from the rules by which this package cuts tiles.

Both agree on what the paper leaves open:

- **Sizes are a lattice, not a bound.** Pools of two rows must not leave one over, which gives N = 188 + 16 k for the
  U-Net of five levels with two convolutions each, and not N > 212 (equation 6): 188 goes, 213 and the paper's own 1434
  do not.
- **Tiles have to begin at multiples of 2^(L - 1)**, where pools take the same rows together as in the whole image.
- **Tiles that fit together do not end together.** Results of 4 + 16 k rows each begin at multiples of 16, so that
  neighbours both make some rows, here at least 4. Each row has to count once (`SampleTile.keep`). Tiles meet without an
  overlap only if (K - 1) n_c is a multiple of 2^(L - 1).

What one tile has of its neighbours is exact for what works pixel by pixel or by windows. Normalisation in training mode
takes a mean over the tile, which is another one than over the image: `sample_tiling(model, training=True)` refuses it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

__all__ = ["TABLE_1", "Architecture", "AxisTiling", "SampleTile", "SampleTiling", "sample_tiling"]

PROBED = 1024
"""Rows of the smallest image for which a model that takes any is looked at."""

MOST_PROBED = 128
"""Sizes that are tried, one after the other, until a model runs."""


# The formulas of the paper ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A U-Net as section 3 describes it.

    Each level has convolutions without padding; pools of 2 x 2 lead to the next one, transposed convolutions of 2 x 2
    back, where what the level has made is cropped and put beside. Filters double from level to level.

    Attributes:
        name: What the paper calls it.
        levels: L, at least 2: `levels - 1` pools.
        convolutions: n_c, of each level and each way.
        filters: n_f, of the first level.
        kernel: K, rows of each filter.
    """

    name: str
    levels: int
    convolutions: int
    filters: int = 64
    kernel: int = 3

    @property
    def lost(self) -> int:
        """Equation 1 for strides of 1 and no padding: rows that a convolution makes less, d."""
        return self.kernel - 1

    @property
    def epsilon(self) -> int:
        """Equation 5: rows at each border that the result does not have, (3 * 2^(L-2) - 1) d n_c."""
        return (3 * 2 ** (self.levels - 2) - 1) * self._lost_of_level

    @property
    def _lost_of_level(self) -> int:
        return self.lost * self.convolutions

    @property
    def alignment(self) -> int:
        """Rows by which sizes, and beginnings of tiles, may differ: 2^(L-1)."""
        return 2 ** (self.levels - 1)

    @property
    def smallest(self) -> int:
        """The smallest image: of it and of `alignment` more, any number of times, no pool leaves a row over.

        The deepest level is left with x rows, of which the levels above make 2^l (x - d n_c) + d n_c.
        """
        lost = self._lost_of_level
        deepest = max(lost - (lost - 1) // self.alignment, 1)
        return self.alignment * (deepest + lost) + (self.alignment - 1) * lost

    @property
    def printed_bound(self) -> int:
        """Equation 6, as printed: N > (2^L + 2^(L-1) - 1) d n_c + 2^(L-2) K. Neither needed nor enough.

        It adds up what all levels need; each of them needs it alone. And it does not know that rows are left over.
        """
        return (3 * self.alignment - 1) * self._lost_of_level + 2 ** (self.levels - 2) * self.kernel

    def admits(self, rows: int) -> bool:
        """Whether an image of so many rows leaves nothing over.

        Args:
            rows: Of the image.
        """
        return rows >= self.smallest and (rows - self.smallest) % self.alignment == 0

    def nearest(self, rows: int) -> tuple[int, ...]:
        """The size itself if it goes; otherwise those next to it that do.

        Args:
            rows: Of an image.
        """
        return _nearest(rows, self.smallest, self.alignment)

    def result_rows(self, rows: int) -> int:
        """Rows of the result: N - 2 ε.

        Args:
            rows: Of the image.

        Raises:
            ValueError: If the image leaves something over, with the nearest that do not.
        """
        self._check(rows)
        return rows - 2 * self.epsilon

    def encoder_rows(self, rows: int) -> tuple[int, ...]:
        """Equation 3: rows that go into each level on the way down, I_0 to I_(L-1).

        Args:
            rows: Of the image.

        Raises:
            ValueError: If the image leaves something over.
        """
        self._check(rows)
        return tuple((rows - (2**level - 1) * self._lost_of_level) // 2**level for level in range(self.levels))

    def decoder_rows(self, rows: int) -> tuple[int, ...]:
        """Equation 4: rows that go into each level on the way up, J_(L-2) to J_0.

        Args:
            rows: Of the image.

        Raises:
            ValueError: If the image leaves something over.
        """
        deepest = self.encoder_rows(rows)[-1]
        return tuple(2**up * deepest - 2 * (2**up - 1) * self._lost_of_level for up in range(1, self.levels))

    def memory(self, rows: int) -> tuple[int, ...]:
        """Equations 9 and 10: numbers that each level keeps for one image, E_0 to E_(L-1) and D_(L-2) to D_0.

        On the way down the image and the results of the convolutions, on the way up what has come up, what is put
        beside it, and the results. Two slips of equation 10 are mended: sizes are J, not I, and a level has as many
        filters on the way up as on the way down. As in the paper the image of a level counts as one channel.

        Args:
            rows: Of the image.

        Raises:
            ValueError: If the image leaves something over.
        """

        def results(level: int, size: int) -> int:
            of_level = (size - (i + 1) * self.lost for i in range(self.convolutions))
            return 2**level * self.filters * sum(own**2 for own in of_level)

        down = [size**2 + results(level, size) for level, size in enumerate(self.encoder_rows(rows))]
        levels = range(self.levels - 2, -1, -1)
        pairs = zip(levels, self.decoder_rows(rows), strict=True)
        up = [2**level * self.filters * 2 * size**2 + results(level, size) for level, size in pairs]
        return (*down, *up)

    def repeated(self, rows: int, tiles: int) -> float:
        """Equation 7: what is computed over what would be for one image, with so many tiles along each axis.

        (N / q + 2 ε)² / (N / q)², which is about 1 + 4 q ε / N; N are the rows of all results here.

        Args:
            rows: Of the whole result.
            tiles: q.
        """
        own = rows / tiles
        return (own + 2 * self.epsilon) ** 2 / own**2

    def table_1_parameters(self, channels: int = 4, classes: int = 1) -> int:
        """The numbers of parameters in Table 1, which are not of the networks that section 3 describes.

        They are, to the last digit, those of the U-Net in the benchmarks of torchgpipe (Kim et al., 2020), with four
        channels in: L pools and a bottleneck below, so L + 1 resolutions; half as many filters on the way up; pixels
        repeated rather than transposed convolutions; no biases. That network pads, so that it has no ε at all.

        Args:
            channels: Of the image.
            classes: Of the result.
        """

        def stack(into: int, middle: int, out: int) -> int:
            widths = [into, *[middle] * (self.convolutions - 1), out]
            return sum(self.kernel**2 * a * b for a, b in itertools.pairwise(widths))

        down = [self.filters * 2**level for level in range(self.levels)]
        before = [channels, *down[:-1]]
        total = sum(stack(into, own, own) for into, own in zip(before, down, strict=True))
        total += stack(down[-1], 2 * down[-1], down[-1])
        below = [*(own // 2 for own in down[1:]), down[-1]]
        total += sum(stack(own + up, own // 2, own // 2) for own, up in zip(down, below, strict=True))
        return total + self.filters // 2 * classes

    def _check(self, rows: int) -> None:
        if not self.admits(rows):
            raise ValueError(_size_fault("rows", rows, self.smallest, self.alignment))


TABLE_1 = (
    Architecture("small", 5, 2),
    Architecture("medium-1", 5, 5),
    Architecture("medium-2", 6, 2),
    Architecture("large", 7, 2),
)
"""The four models of Table 1; ε is 92, 230, 188 and 380 (section 6.2)."""


# Any model ----------------------------------------------------------------------------------------------------------


class SampleTile(NamedTuple):
    """A part of an image, and what of its result is for the whole.

    Attributes:
        begin: First row of the image.
        end: One past its last.
        first: First row of the whole result that is taken from this tile.
        last: One past the last of them.
        skip: Rows of the tile's own result before `first`.
    """

    begin: int
    end: int
    first: int
    last: int
    skip: int

    @property
    def keep(self) -> slice:
        """Of the tile's own result the rows that count; its neighbours make the others as well."""
        return slice(self.skip, self.skip + self.last - self.first)


@dataclasses.dataclass(frozen=True)
class AxisTiling:
    """How a network can be run on parts of its image, along one axis.

    Attributes:
        axis: Which one, from 0: height and width, or depth, height and width.
        halo_before: Rows before those that the result has rows for; the paper's ε.
        halo_after: The same behind them.
        alignment: Tiles begin at multiples of so many rows of the image, and their sizes differ by multiples of it.
        scale: Rows of the image for each row of the result; a fraction where there are more in the result.
        smallest: Rows of the smallest image.
        smallest_result: Rows of the result that it has.
    """

    axis: int
    halo_before: int
    halo_after: int
    alignment: int
    scale: Fraction
    smallest: int
    smallest_result: int

    def admits(self, rows: int) -> bool:
        """Whether an image, or a tile, of so many rows leaves nothing over.

        Args:
            rows: Of the image.
        """
        return rows >= self.smallest and (rows - self.smallest) % self.alignment == 0

    def nearest(self, rows: int) -> tuple[int, ...]:
        """The size itself if it goes; otherwise those next to it that do.

        Args:
            rows: Of an image.
        """
        return _nearest(rows, self.smallest, self.alignment)

    def result_rows(self, rows: int) -> int:
        """Rows of the result of an image, or a tile.

        Args:
            rows: Of the image.

        Raises:
            ValueError: If it leaves something over, with the nearest sizes that do not.
        """
        if not self.admits(rows):
            raise ValueError(_size_fault("rows", rows, self.smallest, self.alignment))
        return self.smallest_result + int((rows - self.smallest) / self.scale)

    def check(self, begin: int, end: int) -> None:
        """See that the network makes of a tile what it makes of these rows in the whole image.

        Args:
            begin: First row of the tile.
            end: One past its last.

        Raises:
            ValueError: With all faults, and what would go instead.
        """
        faults = []
        if begin % self.alignment or begin < 0:
            below = max(begin // self.alignment, 0) * self.alignment
            faults.append(
                f"tiles begin at multiples of {self.alignment}, the nearest at {below} and {below + self.alignment}"
            )
        if not self.admits(end - begin):
            faults.append(_size_fault("end - begin", end - begin, self.smallest, self.alignment))
        if faults:
            raise ValueError(
                f"Rows {begin} to {end} of axis {self.axis} would not give what they give in the whole image: "
                f"{'; '.join(faults)}"
            )

    def tiles(self, rows: int, tile_rows: int) -> tuple[SampleTile, ...]:
        """An image cut into tiles of one size that together make its result, each row taken from one of them.

        Args:
            rows: Of the image.
            tile_rows: Of each tile, its halo included.

        Raises:
            ValueError: If one of them leaves something over, or tiles are too small to go on from one to the next.
        """
        whole = self.result_rows(rows)
        if tile_rows > rows:
            raise ValueError(f"`tile_rows` must be at most the image's {rows}. Received: tile_rows={tile_rows}.")
        every = int(self.alignment / self.scale)  # Rows of the result between beginnings that are next to each other.
        step = self.result_rows(tile_rows) // every * every
        if tile_rows < rows and not step:
            more = next(n for n in itertools.count(tile_rows, self.alignment) if self.result_rows(n) >= every)
            raise ValueError(
                f"`tile_rows` must be at least {more}: tiles begin {every} rows of the result apart, and "
                f"{tile_rows} rows give {self.result_rows(tile_rows)}. Received: tile_rows={tile_rows}."
            )
        begins = [*range(0, rows - tile_rows, int(step * self.scale) or 1), rows - tile_rows]
        found: list[SampleTile] = []
        for begin in begins:
            own = int(begin / self.scale)
            first = found[-1].last if found else 0
            last = min(own + self.result_rows(tile_rows), whole)
            found.append(SampleTile(begin, begin + tile_rows, first, last, first - own))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class SampleTiling:
    """How a network can be run on parts of its image.

    Attributes:
        axes: Along each axis that has more than one row.
    """

    axes: tuple[AxisTiling, ...]

    def check(self, *bounds: tuple[int, int]) -> None:
        """See that the network makes of a part of an image what it makes of it in the whole.

        Args:
            *bounds: First row, and one past the last, along each axis.

        Raises:
            ValueError: With the first axis along which it does not, and what would go instead.
        """
        for axis, (begin, end) in zip(self.axes, bounds, strict=True):
            axis.check(begin, end)

    def tiles(self, sizes: Sequence[int], tile_sizes: Sequence[int]) -> tuple[tuple[SampleTile, ...], ...]:
        """All tiles of an image, each as its rows along each axis; the last axis varies first.

        Args:
            sizes: Of the image, along each axis.
            tile_sizes: Of each tile, its halo included.

        Raises:
            ValueError: As `AxisTiling.tiles`.
        """
        along = [axis.tiles(*pair) for axis, *pair in zip(self.axes, sizes, tile_sizes, strict=True)]
        return tuple(itertools.product(*along))


def sample_tiling(model: Any, size: int | Sequence[int] | None = None, training: bool = False) -> SampleTiling:
    """How a model can be run on parts of its image, each as an image of its own.

    The model is traced, not run, and each of its operations asked which rows it needs.

    Args:
        model: A Keras model of one image and one result, without padding.
        size: Rows, or the rows along each axis that the model leaves open, of an image to trace it for: large enough
            that its smallest tensor has some ten rows. Defaults to the first size from 1024 on that the model takes.
        training: Whether it is looked at as in training, where normalisation and dropout do something else.

    Returns:
        The halo, the alignment and the sizes along each axis.

    Raises:
        RewriteError: If an operation pads, mixes rows of the whole image, or has no rule.
        ValueError: If the model is of one size alone, of which something is left over, or does not run on `size`.
    """
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "`model` must be a Keras model of one image and one result. A subclassed one becomes that with "
            f"keras.Model(image, model(image)). Received: model={model!r}."
        )
    traced = _first_that_runs(model, size, training)
    wasteful = {dim: view for dim, view in zip(traced.dims, traced.views, strict=True) if view.wasteful}
    left_open = _open_dimensions(model)
    for dim, view in wasteful.items():
        if dim not in left_open:
            raise ValueError(
                f"`model` takes {view.extent} rows and leaves some over, first in {view.wasteful}, so that tiles would "
                f"not give what the image gives. The nearest sizes of which nothing is left are {view.admissible} and "
                f"{view.admissible + view.alignment}. Received: model={model!r}."
            )
    if wasteful:
        fitting = {dim: view.admissible for dim, view in zip(traced.dims, traced.views, strict=True)}
        traced = _field(model, [fitting.get(dim, 1) for dim in left_open], training)
    return SampleTiling(tuple(map(_axis_tiling, traced.axes, traced.views)))


def _axis_tiling(axis: int, view: Any) -> AxisTiling:
    halo = math.ceil(view.extent - view.scale * view.out_extent)
    smallest_result = view.out_extent - int((view.extent - view.smallest) / view.scale)
    return AxisTiling(axis, halo // 2, halo - halo // 2, view.alignment, view.scale, view.smallest, smallest_result)


def _open_dimensions(model: Any) -> list[int]:
    """Dimensions of the image, the batch aside, that the model leaves open."""
    return [dim for dim, rows in enumerate(model.inputs[0].shape) if dim and rows is None]


def _first_that_runs(model: Any, size: int | Sequence[int] | None, training: bool) -> Any:
    """A `ReceptiveField` of the model, for the size that was asked for or the first that it takes."""
    left_open = _open_dimensions(model)
    if size is None:
        sizes = [[PROBED + more] * len(left_open) for more in range(MOST_PROBED if left_open else 1)]
        asked = f"Tried: {PROBED} to {PROBED + MOST_PROBED - 1} rows. Give a `size` that it runs on."
    else:
        sizes = [[int(own) for own in size] if isinstance(size, Sequence) else [int(size)] * len(left_open)]
        asked = f"Received: size={size!r}."
        if len(sizes[0]) != len(left_open):
            raise ValueError(f"`size` needs {len(left_open)} numbers, one for each dimension left open. {asked}")
    for rows in sizes:
        try:
            return _field(model, rows, training)
        except ValueError as error:  # Keras, of layers whose shapes do not go together.
            last = error
    raise ValueError(f"`model` does not run. {asked} It says: {' '.join(str(last).split())}") from last


def _field(model: Any, rows: Sequence[int], training: bool) -> Any:
    # Imported here: formulas need no TensorFlow, which takes seconds.
    import tensorflow as tf

    from rewriters.analysis import Analysis
    from rewriters.normalise import read
    from rewriters.receptive import ReceptiveField

    image = model.inputs[0]
    shape = [1, *image.shape[1:]]
    for dim, own in zip(_open_dimensions(model), rows, strict=True):
        shape[dim] = own
    step = tf.function(lambda images: model(images, training=training), autograph=False)
    graph = read(step.get_concrete_function(tf.TensorSpec(shape, image.dtype)))
    return ReceptiveField(Analysis(graph), graph.inputs[0], graph.outputs[0])


def _nearest(rows: int, smallest: int, alignment: int) -> tuple[int, ...]:
    if rows <= smallest:
        return (smallest,)
    below = rows - (rows - smallest) % alignment
    return (rows,) if below == rows else (below, below + alignment)


def _size_fault(argument: str, rows: int, smallest: int, alignment: int) -> str:
    nearest = " or ".join(map(str, _nearest(rows, smallest, alignment)))
    return (
        f"`{argument}` must be {smallest} or that and a multiple of {alignment}, so that nothing is left over. "
        f"Received: {argument}={rows}. Nearest: {nearest}."
    )
