"""Prepare folders for a hub: files, checksums, a model card."""
