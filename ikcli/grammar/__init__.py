"""Constrained output: GBNF grammars and JSON schemas as masks over the vocabulary.

Importing this package does not load the grammar library; `ikcli.grammar.grammars` does.
"""

from ikcli.grammar.nodes import GrammarError

__all__ = ["GrammarError"]
