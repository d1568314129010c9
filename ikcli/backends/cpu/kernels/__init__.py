"""Kernel factories; each returns plain Python that the compile worker turns into machine code."""
