"""The compiler: joint graphs of training steps, op rules, and passes that rewrite them.

It carries out plans and refuses what it cannot do exactly. Policy (which segments, how
many tiles, what fits) lives in `tflms_sft`, which imports this package, never the reverse.
"""

__all__: list[str] = []
