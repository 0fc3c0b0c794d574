"""`rewrite`, `RewrittenStep`, `measure` and `LMSParams.tuned`: rewriting any traced step.

Imports `tflms_sft._pipeline` and the packages below it.
"""
