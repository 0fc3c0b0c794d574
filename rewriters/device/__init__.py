"""The model of one device: allocator, kernel scratch memory, in-place and fusion facts, peak memory.

A question about a device or its kernels is answered here and nowhere else. What a plan decides does not belong here.
Imports `rewriters.ir`.
"""

__all__: list[str] = []
