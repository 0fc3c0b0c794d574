"""Memory and time of plain training and of training within budgets: ResNet-50, with BatchNorm in training mode.

    python -m benchmarks.resnet50 --image-size 1024 --batch 1 --tile-budget 1/2 --swap-budget 1/4
    python -m benchmarks.resnet50 --image-size 224 --batch 32 --tile-budget 1GiB

The exit code is 1 if a rewritten variant fails. `docs/benchmarks/index.md` defines the figures.
"""

from collections.abc import Sequence

from benchmarks import _child, _compare_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the figures."""
    return _compare_report.compare_budgets("benchmarks.resnet50", __doc__, "resnet50", arguments)


if __name__ == "__main__":
    _child.leave_with(main)
