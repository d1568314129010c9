"""Architectures whose layers keep a state instead of rows of a cache: scans, delta nets, short convolutions."""
