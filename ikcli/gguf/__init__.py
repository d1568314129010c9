"""Read and write GGUF files; tensor types and metadata values."""
