"""Measure the quality of a model: perplexity, KL divergence, choice tasks, embeddings."""
