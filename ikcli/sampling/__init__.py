"""Choosing the next token from logits: parameters, samplers and their order, penalties, probabilities."""
