"""Parts of an image for each device, for networks without padding: which sizes go, which borders they need.

Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP '20, train U-Nets on images that no device can
hold: without padding a network makes the middle of an image, and only its surroundings of ε pixels matter to it. So an
image is cut into tiles that overlap, each is trained as an image of its own, and devices exchange nothing but gradients
(section 4, "sample parallel"). This module has their formulas for the U-Nets that they describe (`Architecture`), and
`sample_tiling`, which finds the same out for any Keras model from the rules by which this package cuts tiles.
`sample_parallel` makes of a data set of images one of tiles that trains the same, on one device or several.

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
    def smallest_result(self) -> int:
        """Rows of the result that the smallest image has."""
        return self.smallest - 2 * self.epsilon

    @property
    def scale(self) -> Fraction:
        """Rows of the image for each row of the result: as many go in as come out, but for ε."""
        return Fraction(1)

    @property
    def printed_bound(self) -> int:
        """Equation 6, as printed: N > (2^L + 2^(L-1) - 1) d n_c + 2^(L-2) K. Neither needed nor enough.

        It adds up what all levels need; each of them needs it alone. And it does not know that rows are left over.
        """
        return (3 * self.alignment - 1) * self._lost_of_level + 2 ** (self.levels - 2) * self.kernel

    def encoder_rows(self, rows: int) -> tuple[int, ...]:
        """Equation 3: rows that go into each level on the way down, I_0 to I_(L-1).

        Args:
            rows: Of the image.

        Raises:
            ValueError: If the image leaves something over.
        """
        self.check_rows(rows)
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


TABLE_1 = (
    Architecture("small", 5, 2),
    Architecture("medium-1", 5, 5),
    Architecture("medium-2", 6, 2),
    Architecture("large", 7, 2),
)
"""The four models of Table 1; ε is 92, 230, 188 and 380 (section 6.2)."""
