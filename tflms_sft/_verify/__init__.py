"""`verify`: run a step and its rewritten version from the same state, and compare all results.

Imports `tflms_sft._keras` and the packages below it.
"""
