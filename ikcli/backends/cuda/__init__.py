"""The CUDA backend: CUDA C++ kernels shipped as PTX and run through cuda-python (driver.py); no imports here."""
