"""Placement, loading, KV cache and sessions."""
