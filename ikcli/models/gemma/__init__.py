"""Gemma 2 to 4."""
