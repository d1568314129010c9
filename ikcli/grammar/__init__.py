"""Constrained output: GBNF grammars and JSON schemas as masks over the vocabulary."""
