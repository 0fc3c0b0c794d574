"""Swapping (TFLMS): which tensors leave the device, when they come back, and where they are meanwhile.

The swap pass, the search for the ops that trigger swap-ins, tiers, spill files, and two passes that make swapping
worth more. Imports the packages up to `rewriters.tiling`.
"""

__all__: list[str] = []
