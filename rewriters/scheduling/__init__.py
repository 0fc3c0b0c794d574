"""Passes that only add control edges: the order in which ops of a finished graph run.

They change no op and no tensor. Imports the packages up to `rewriters.canonicalize`.
"""

__all__: list[str] = []
