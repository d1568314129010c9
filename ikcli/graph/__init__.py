"""Recorded graphs and execution plans."""
