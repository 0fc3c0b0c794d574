"""Op rules: how each op type behaves when its tensors are cut into tiles.

One module per family of ops, the registry, and the vocabulary of rules (intervals, axis layouts). `catalogue` imports
all families, which fills the registry. A rule knows nothing of plans, loops or networks.
Imports `rewriters.ir` and `rewriters.device`.
"""

__all__: list[str] = []
