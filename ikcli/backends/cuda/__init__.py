"""CUDA backend: kernels in CUDA C++, packaged as PTX, run by the driver API."""
