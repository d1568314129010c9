"""Backends that execute a recorded graph: reference (NumPy), cpu (Numba kernels), cuda (PTX kernels)."""
