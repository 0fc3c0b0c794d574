"""Text, byte sizes, progress lines and bisection, without TensorFlow and without terms of the project."""
