"""The version, and those of others that go with it, alone in a module that imports nothing: `setup.py` runs it."""

__all__ = ["__version__"]

__version__ = "0.1.0"

SUPPORTED = {"tensorflow": ((2, 18), (2, 21)), "keras": ((3, 8), (3, 15))}
"""Oldest and newest release that `make test-versions` tests. Older releases are refused, newer ones used with a notice.

The compiler reads graphs as TensorFlow and Keras trace them, so raise the newest release only after a test run.
"""

PYTHON = ((3, 10), (3, 13))
"""Oldest and newest CPython, likewise."""
