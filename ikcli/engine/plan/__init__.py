"""From a GGUF header to a plan: sizes, placement, graphs, programs, bytes per device. Reads no weight."""
