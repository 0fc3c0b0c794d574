"""`verify`: run a step and its rewritten twin on the same numbers, and judge the differences.

Imports `tflms_sft._keras` and the packages below it.
"""
