"""Parameter objects that users construct, checked at construction, and the request that they form.

An argument of the public interface is added here. No module here depends on a graph. Imports `tflms_sft._util` and
`tflms_sft._machine`.
"""
