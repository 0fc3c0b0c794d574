"""Image tiles for data parallelism over devices, for networks without padding: valid sizes and halos.

Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP '20, train U-Nets on images that do not fit on one
device. Without padding, the result of a network is smaller than its image by a border of ε pixels, and a part of the
result depends only on its surroundings of ε pixels. So the image is cut into overlapping tiles, each tile is trained as
an image of its own, and devices exchange only gradients (section 4, "sample parallel").

- `Architecture` has the paper's formulas for its U-Nets.
- `sample_tiling` computes the same numbers for any Keras model from the op rules.
- `sample_parallel` turns a data set of images into a data set of tiles with equal training.

The formulas and the rules agree on three points that the paper leaves open:

- **Valid sizes are a lattice, not a bound.** Pools of two rows must not leave a row over. This gives N = 188 + 16 k for
  the U-Net of five levels with two convolutions each, instead of N > 212 (equation 6): 188 is valid; 213 and the
  paper's own 1434 are not.
- **Tiles must begin at multiples of 2^(L - 1)**, where pools group the same rows as in the whole image.
- **Adjacent tiles overlap in the result.** Results of 4 + 16 k rows begin at multiples of 16, so adjacent tiles both
  compute some rows, here at least 4. Each row must count once (`SampleTile.keep`). Tiles are disjoint only if
  (K - 1) n_c is a multiple of 2^(L - 1).

Tiles are exact for pointwise ops and for ops with windows. Normalisation in training mode takes the mean over the tile
instead of the image, so `sample_tiling(model, training=True)` refuses it.
"""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

from tflms_sft._image_tiles.sample_dataset import sample_parallel
from tflms_sft._image_tiles.sample_tiling import AxisTiling, SampleTile, SampleTiling, sample_tiling
from tflms_sft._image_tiles.valid_sizes import ImageSizes

__all__ = [
    "TABLE_1",
    "Architecture",
    "AxisTiling",
    "SampleTile",
    "SampleTiling",
    "sample_parallel",
    "sample_tiling",
]


@dataclasses.dataclass(frozen=True)
class Architecture(ImageSizes):
    """A U-Net of section 3.

    Each level has convolutions without padding. Pools of 2 x 2 lead down to the next level, transposed convolutions of
    2 x 2 lead back up, where the cropped result of the level is concatenated. Filters double from level to level.

    Attributes:
        name: Name in the paper.
        levels: Number of levels L, at least 2, with L - 1 pools.
        convolutions: Convolutions n_c of each level in each direction.
        filters: Filters n_f of the first level.
        kernel: Rows K of each filter.
    """

    name: str
    levels: int
    convolutions: int
    filters: int = 64
    kernel: int = 3

    @property
    def lost(self) -> int:
        """Rows d that a convolution removes: equation 1 for strides of 1 and no padding."""
        return self.kernel - 1

    @property
    def epsilon(self) -> int:
        """Rows that the result lacks at each border (equation 5): (3 * 2^(L-2) - 1) d n_c."""
        return (3 * 2 ** (self.levels - 2) - 1) * self._lost_of_level

    @property
    def _lost_of_level(self) -> int:
        return self.lost * self.convolutions

    @property
    def alignment(self) -> int:
        """Divisor of the differences between valid sizes, and of the beginnings of tiles: 2^(L-1) rows."""
        return 2 ** (self.levels - 1)

    @property
    def smallest(self) -> int:
        """Rows of the smallest valid image.

        The deepest level has x rows there, from which the levels above get 2^l (x - d n_c) + d n_c.
        """
        lost = self._lost_of_level
        deepest = max(lost - (lost - 1) // self.alignment, 1)
        return self.alignment * (deepest + lost) + (self.alignment - 1) * lost

    @property
    def smallest_result(self) -> int:
        """Rows of the result of the smallest image."""
        return self.smallest - 2 * self.epsilon

    scale = Fraction(1)
    """Rows of the image per row of the result: 1, because the network goes back up to its first level."""

    @property
    def printed_bound(self) -> int:
        """Bound of equation 6 as printed: N > (2^L + 2^(L-1) - 1) d n_c + 2^(L-2) K. Neither necessary nor sufficient.

        It adds up the needs of all levels, although each level needs its rows alone, and it ignores rows left over.
        """
        return (3 * self.alignment - 1) * self._lost_of_level + 2 ** (self.levels - 2) * self.kernel

    def encoder_rows(self, rows: int) -> tuple[int, ...]:
        """Return the input rows of each level on the way down (equation 3), I_0 to I_(L-1).

        Args:
            rows: Rows of the image.

        Raises:
            ValueError: If the size is not valid.
        """
        self.check_rows(rows)
        return tuple((rows - (2**level - 1) * self._lost_of_level) // 2**level for level in range(self.levels))

    def decoder_rows(self, rows: int) -> tuple[int, ...]:
        """Return the input rows of each level on the way up (equation 4), J_(L-2) to J_0.

        Args:
            rows: Rows of the image.

        Raises:
            ValueError: If the size is not valid.
        """
        deepest = self.encoder_rows(rows)[-1]
        return tuple(2**up * deepest - 2 * (2**up - 1) * self._lost_of_level for up in range(1, self.levels))

    def memory(self, rows: int) -> tuple[int, ...]:
        """Return the elements that levels store for one image (equations 9 and 10), E_0 to E_(L-1), D_(L-2) to D_0.

        On the way down these are the input and the results of the convolutions; on the way up the input, the
        concatenated tensor, and the results. Two errors of equation 10 are corrected: sizes are J, not I, and a level
        has equally many filters on both ways. As in the paper, the input of a level counts as one channel.

        Args:
            rows: Rows of the image.

        Raises:
            ValueError: If the size is not valid.
        """

        def results(level: int, size: int) -> int:
            sides = (size - (i + 1) * self.lost for i in range(self.convolutions))
            return 2**level * self.filters * sum(side**2 for side in sides)

        down = [size**2 + results(level, size) for level, size in enumerate(self.encoder_rows(rows))]
        levels = range(self.levels - 2, -1, -1)
        pairs = zip(levels, self.decoder_rows(rows), strict=True)
        up = [2**level * self.filters * 2 * size**2 + results(level, size) for level, size in pairs]
        return (*down, *up)

    def repeated(self, rows: int, tiles: int) -> float:
        """Return the ratio of the work with tiles to the work without (equation 7).

        It is (N / q + 2 ε)² / (N / q)², about 1 + 4 q ε / N, where N counts rows of the result.

        Args:
            rows: Rows of the whole result, N.
            tiles: Number of tiles along each axis, q.
        """
        tile_rows = rows / tiles
        return (tile_rows + 2 * self.epsilon) ** 2 / tile_rows**2

    def table_1_parameters(self, channels: int = 4, classes: int = 1) -> int:
        """Return the number of parameters that Table 1 prints, which belongs to another network than that of section 3.

        It is exactly that of the U-Net in the benchmarks of torchgpipe (Kim et al., 2020) with four input channels:
        L pools and a bottleneck below, so L + 1 resolutions; half as many filters on the way up; upsampling by
        repetition instead of transposed convolutions; no biases. That network pads, so its ε is 0.

        Args:
            channels: Channels of the image.
            classes: Channels of the result.
        """

        def stack(inputs: int, middle: int, outputs: int) -> int:
            widths = [inputs, *[middle] * (self.convolutions - 1), outputs]
            return sum(self.kernel**2 * a * b for a, b in itertools.pairwise(widths))

        down = [self.filters * 2**level for level in range(self.levels)]
        before = [channels, *down[:-1]]
        total = sum(stack(inputs, width, width) for inputs, width in zip(before, down, strict=True))
        total += stack(down[-1], 2 * down[-1], down[-1])
        below = [*(width // 2 for width in down[1:]), down[-1]]
        total += sum(stack(width + up, width // 2, width // 2) for width, up in zip(down, below, strict=True))
        return total + self.filters // 2 * classes


TABLE_1 = (
    Architecture("small", 5, 2),
    Architecture("medium-1", 5, 5),
    Architecture("medium-2", 6, 2),
    Architecture("large", 7, 2),
)
"""The four models of Table 1; ε is 92, 230, 188 and 380 (section 6.2)."""
