"""Entering and leaving Keras: callbacks, the context manager, and the patches of a model's steps.

What is said to users while they train is in `messages`. Imports `tflms_sft._rewrite` and the packages below it.
"""
