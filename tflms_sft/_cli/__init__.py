"""The command line `tflms-sft`: a module per command, and the parser.

Arguments are read before TensorFlow is imported, so `main` and `parser` import neither it nor `rewriters`. The commands
import anything they need, inside functions.
"""
