"""Everything that a user constructs, checked at construction, and the request that it makes.

An argument of the public interface is added here. Nothing here has seen a graph. Imports `tflms_sft._util` and
`tflms_sft._machine`.
"""
