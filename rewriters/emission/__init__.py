"""Emit tile loops as `tf.while_loop`s: buffers, loop bodies, outputs, carried rows, and the pass that puts them in.

Plans come from `rewriters.tiling`; nothing is decided here. Imports the packages up to `rewriters.swapping`.
"""

__all__: list[str] = []
