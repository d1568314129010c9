"""Turn a GGUF header into a plan: sizes, placement, graphs, programs, bytes per device. No weight is read."""
