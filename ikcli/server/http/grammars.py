"""Compiling grammars for the model's vocabulary: the server's use of ikcli.grammar (provisional)."""

from __future__ import annotations

from ikcli.errors import UnsupportedError
from ikcli.grammar.spec import GrammarSpec
from ikcli.server.http.constraints import ConstraintMaker
from ikcli.tokenizer import Tokenizer


class GrammarService:
    """Grammars of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def compile(self, spec: GrammarSpec) -> ConstraintMaker:
        """A maker of constraints."""
        raise UnsupportedError("grammars are not supported yet")
