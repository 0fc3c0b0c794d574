"""Tracing: a step for one signature, the Keras layers of its ops, effects on counters, a step for part of a batch.

Nothing is planned here. Imports `tflms_sft._params` and the packages below it.
"""
