"""Measurements of plain and rewritten training steps; see README.md beside this file."""
