"""Importance matrices and activation second moments, collected while a model reads a text."""
