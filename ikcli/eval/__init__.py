"""Measurements: perplexity, KL divergence, sweep-bench."""
