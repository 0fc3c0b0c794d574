"""The version, alone in a module that imports nothing: `setup.py` runs it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
