"""Slots over one session: continuous batching, prompt reuse, cancellation. It knows nothing about HTTP."""
