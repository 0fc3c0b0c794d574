"""Text, byte sizes, progress lines and versions of requirements, without TensorFlow."""
