"""The CPU backend: SIMD vocabulary, kernels, the object-code cache, programs and the thread team."""
