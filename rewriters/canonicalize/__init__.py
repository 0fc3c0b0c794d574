"""Canonicalization: one module for each rewriting that makes graphs uniform before they are analysed, and the driver.

A canonicalization computes the same and decides nothing about memory. Imports the packages up to `rewriters.analysis`.
"""

__all__: list[str] = []
