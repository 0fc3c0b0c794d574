"""Facts about a whole step: forward and backward roles, orders, constant folding, receptive fields.

An analysis reads a graph and changes nothing. Imports `rewriters.ir`, `rewriters.device` and `rewriters.rules`.
"""

__all__: list[str] = []
