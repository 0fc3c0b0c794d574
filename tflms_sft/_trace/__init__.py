"""Tracing of steps: one signature, the Keras layers of its ops, effects on counters, steps for parts of a batch.

Planning does not belong here. Imports `tflms_sft._params` and the packages below it.
"""
