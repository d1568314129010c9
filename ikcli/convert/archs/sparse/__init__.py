"""Conversion of architectures whose queries see chosen positions, or entries in place of positions."""
