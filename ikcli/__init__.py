"""ik: run, quantize and measure large language models from GGUF files."""

__version__ = "0.1.0"
