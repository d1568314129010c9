"""Importance matrices and second moments of activations, collected while a model reads a text."""
