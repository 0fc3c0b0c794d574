"""The version, and those of others that go with it, alone in a module that imports nothing: `setup.py` runs it."""

__all__ = ["__version__"]

__version__ = "0.1.0"

# The compiler reads graphs as these releases trace them; a new one is claimed once CI runs it.
SUPPORTED = {"tensorflow": ((2, 21), (2, 22)), "keras": ((3, 15), (3, 16))}
"""First version that is supported, and first that is not."""
