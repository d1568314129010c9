"""Checkpoints in the hub's format (config.json and safetensors) to GGUF."""
