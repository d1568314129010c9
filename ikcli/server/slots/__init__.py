"""Slots over one session: continuous batching, prompt reuse, cancellation. Knows nothing of HTTP."""
