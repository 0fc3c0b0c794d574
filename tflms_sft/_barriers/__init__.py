"""Tile plans of steps with barriers: levels, the tensors that lie between their loops, and the tiles of each loop.

`barriers.py` cuts a step into levels and loops, `tiled_loops.py` chooses the tiles of given loops within a limit, and
`barrier_search.py` chooses the loops: which levels stay untiled, and which tensors are stored, dropped, or in files.
"""
