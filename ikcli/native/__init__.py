"""Numba as a compiler: SIMD vocabulary, object-code cache, run without Numba."""
