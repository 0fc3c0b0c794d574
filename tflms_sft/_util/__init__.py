"""Text, byte sizes, progress lines and a search, free of TensorFlow and of the project's own terms."""
