"""Text, byte sizes, progress lines, bisection and versions of requirements, without TensorFlow."""
