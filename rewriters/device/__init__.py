"""Effects of a device on a graph: allocator, kernel scratch memory, in-place and fusion facts, peak memory.

A question about kernels is answered here and nowhere else; the facts of a device are in `ir/device_model.py`. What a
plan decides does not belong here. Imports `rewriters.ir`.
"""

__all__: list[str] = []
