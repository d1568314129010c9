"""The CPU backend: lowering rules, kernels, programs and the thread team."""
