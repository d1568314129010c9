"""Numba as a compiler: SIMD vocabulary, object-code cache, and runs without Numba."""
