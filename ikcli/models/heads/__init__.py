"""Heads in files of other architectures than that of the model whose states they read."""
