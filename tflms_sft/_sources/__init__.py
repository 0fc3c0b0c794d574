"""Images in files: layers that read them and write them by regions.

Imports `tflms_sft._util` and `rewriters`.
"""
