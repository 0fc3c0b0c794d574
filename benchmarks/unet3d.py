"""Memory and time of plain training and of training within budgets: a 3-D U-Net, with BatchNorm in training mode.

    python -m benchmarks.unet3d --swap-budget 1/2
    python -m benchmarks.unet3d --image-size 64 --tile-budget 400MiB

The exit code is 1 if a rewritten variant fails. `docs/benchmarks/index.md` defines the figures.
"""

from collections.abc import Sequence

from benchmarks import _child, _compare_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    return _compare_report.compare_budgets("benchmarks.unet3d", __doc__, "unet3d-dice", arguments)


if __name__ == "__main__":
    _child.leave_with(main)
