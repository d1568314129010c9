"""SIMD vector types and intrinsics for Numba kernels."""
