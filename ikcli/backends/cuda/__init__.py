"""CUDA backend: kernels are CUDA C++ sources shipped as PTX, run through cuda-python (driver.py), nothing at import."""
