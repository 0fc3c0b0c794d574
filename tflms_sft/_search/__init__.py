"""Tile plans of one traced step within a memory limit: estimates of segments and loops, and the searches over them.

Everything here chooses tiles and files; `_planner` weighs them against swaps, and `rewriters` executes the plans.
"""

__all__: list[str] = []
