"""Tensor types: how their bytes are decoded, encoded, repacked and measured."""
