"""GGUF files: reader, writer, names."""
