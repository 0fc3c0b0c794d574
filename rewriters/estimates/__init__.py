"""Estimates of rewritten steps: memory of tile loops, time of ops, and what no model covers.

An estimate changes nothing and decides nothing. Imports the packages up to `rewriters.emission`.
"""

__all__: list[str] = []
