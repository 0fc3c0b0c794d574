"""Measurements of original and rewritten training steps; `docs/benchmarks/index.md` defines the figures."""
