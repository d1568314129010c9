"""Heads that draft from the states of a model: of its own architecture, and of others."""
