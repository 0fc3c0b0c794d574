"""The graph and static facts about it.

Nodes, tensors and edges; the device that a graph is rewritten for; static values and symbolic dimensions; inlining of
called functions; variables. Every private TensorFlow import of the project is in `tf_internals`. Facts that need
autodiff roles or op rules do not belong here. Imports `rewriters.errors` alone.
"""

__all__: list[str] = []
