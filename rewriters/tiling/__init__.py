"""Decide what runs in tiles, without TensorFlow ops: segments, barriers, checkpoints, tiles and carried rows.

A segment goes in, a list of tile loops comes out, each with the rows that every tensor needs. How many tiles is a
policy and lives in `tflms_sft._planner`. Imports the packages up to `rewriters.analysis`.
"""

__all__: list[str] = []
