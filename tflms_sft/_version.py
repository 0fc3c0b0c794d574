"""The version of the package and the releases that it supports. `setup.py` runs this module, which imports nothing."""

__all__ = ["__version__"]

__version__ = "0.1.0"

SUPPORTED_RELEASES = {"tensorflow": ((2, 18), (2, 21)), "keras": ((3, 8), (3, 15))}
"""(oldest, newest) tested release of each package, as (major, minor).

Older releases are refused, newer ones used with a notice. `make test-versions` tests both ends. The compiler reads
graphs as TensorFlow and Keras trace them, so raise the newest release only after a test run.
"""

PYTHON_RELEASES = ((3, 10), (3, 13))
"""(oldest, newest) tested release of CPython, as (major, minor)."""
