"""Recorder of the ops that optimizers and metrics add while a step is traced.

A graph does not distinguish counters that depend neither on data nor on gradients: `iterations` counts steps, and the
number of samples that a metric has seen counts micro-batches. The calls of optimizers and metrics do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from rewriters.pipelining.step_partition import EffectHints


class EffectRecorder:
    """Ranges of ops that optimizers and metrics added, by graph."""

    def __init__(self) -> None:
        self._once: list[tuple[Any, int, int]] = []
        self._repeated: list[tuple[Any, int, int]] = []

    def of(self, graph: Any) -> EffectHints:
        """Return the names of recorded ops of one graph."""
        names = [operation.name for operation in graph.get_operations()]

        def within(ranges: list[tuple[Any, int, int]]) -> frozenset[str]:
            return frozenset(name for owner, begin, end in ranges if owner is graph for name in names[begin:end])

        return EffectHints(within(self._once), within(self._repeated))

    def watching(self, method: Callable[..., Any], repeated: bool) -> Callable[..., Any]:
        """Wrap a method so that the ops which it adds are recorded."""

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            begin = len(graph.get_operations())
            try:
                return method(*args, **kwargs)
            finally:
                end = len(graph.get_operations())
                (self._repeated if repeated else self._once).append((graph, begin, end))

        return watched


@contextlib.contextmanager
def watched_effects() -> Iterator[EffectRecorder]:
    """Record the ops of every optimizer and metric."""
    effects = EffectRecorder()
    changed: list[tuple[type, str, Any]] = []
    for base, name, repeated in (
        (keras.optimizers.Optimizer, "apply", False),
        (keras.metrics.Metric, "update_state", True),
    ):
        for cls in _with_subclasses(base):
            for owner in [cls] if cls is not base else [c for c in base.__mro__ if name in c.__dict__][:1]:
                if name in owner.__dict__:
                    changed.append((owner, name, owner.__dict__[name]))
                    setattr(owner, name, effects.watching(owner.__dict__[name], repeated))
    try:
        yield effects
    finally:
        for owner, name, method in reversed(changed):
            setattr(owner, name, method)


def _with_subclasses(cls: type) -> list[type]:
    classes: list[type] = [cls]
    for other in classes:
        subclasses: list[type] = other.__subclasses__()
        classes.extend(sub for sub in subclasses if sub not in classes)
    return classes
