"""Several machines: addresses as users write them, connecting, and noticing a lost worker.

Imports `tflms_sft._util` and `rewriters.ir`.
"""
