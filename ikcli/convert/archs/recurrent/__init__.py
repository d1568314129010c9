"""Conversion of architectures whose layers keep a state: scans, delta nets, short convolutions."""
