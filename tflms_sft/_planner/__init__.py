"""Policy: from a traced step and a budget to tiles and swaps.

How many tiles, which segments, what is swapped: decided here and nowhere else. `rewriters` carries the plans out.
Imports `tflms_sft._report` and the packages below it.
"""
