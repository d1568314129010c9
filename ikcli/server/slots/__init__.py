"""Slots over one session: continuous batching, prompt reuse, cancellation. Independent of HTTP."""
