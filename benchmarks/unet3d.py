"""Compares the plain training step of a 3-D U-Net, its BatchNorms in training mode, with those that keep budgets.

    python -m benchmarks.unet3d --swap-budget 1/2
    python -m benchmarks.unet3d --image-size 64 --tile-budget 400MiB

README.md beside this file says what the figures mean.
"""

from collections.abc import Sequence

from benchmarks import _child, _compare_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the figures."""
    return _compare_report.compare_budgets("benchmarks.unet3d", __doc__, "unet3d-dice", arguments)


if __name__ == "__main__":
    _child.leave_with(main)
