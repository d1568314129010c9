"""Cached rows of all conversations, shared by prefix, in RAM and on disk."""
