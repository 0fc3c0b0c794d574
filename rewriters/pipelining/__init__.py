"""Pipelines over several devices: stages, schedules, micro-batch unrolling, and the pass that places all of it.

Whether micro-batches equal the batch is not decided here but in `rewriters.batch_semantics`. Imports the packages up
to `rewriters.estimates`.
"""

__all__: list[str] = []
