"""Parts of images as samples of their own, for data parallelism.

Imports `tflms_sft._util` and `rewriters`.
"""
