"""Exact decoders in NumPy, one file per family of types: blocks of bytes to float32."""
