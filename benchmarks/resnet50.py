"""Compares the plain training step of ResNet-50, its BatchNorms in training mode, with those that keep budgets.

    python -m benchmarks.resnet50 --image-size 1024 --batch 1 --tile-budget 1/2 --swap-budget 1/4
    python -m benchmarks.resnet50 --image-size 224 --batch 32 --tile-budget 1GiB

README.md beside this file says what the figures mean.
"""

from collections.abc import Sequence

from benchmarks import _child, _compare_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the figures."""
    return _compare_report.compare_budgets("benchmarks.resnet50", __doc__, "resnet50", arguments)


if __name__ == "__main__":
    _child.leave_with(main)
