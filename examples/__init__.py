"""Programs that show what the package does; run them as modules from the repository's root."""
