"""Batches of a training: the first ones, read ahead of their step, and the sizes that a plan holds for."""
