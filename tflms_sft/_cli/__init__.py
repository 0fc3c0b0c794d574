"""The command line `tflms-sft`: what is asked for is read before TensorFlow is imported."""

__all__: list[str] = []
