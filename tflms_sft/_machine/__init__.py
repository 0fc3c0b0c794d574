"""The machine that trains: free memory, and the rates at which it computes and moves bytes, measured once.

Nothing here knows a plan. Imports `tflms_sft._util` and `rewriters`.
"""
