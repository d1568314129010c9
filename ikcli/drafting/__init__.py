"""Guess the next tokens of texts, and decide how many guesses are worth checking. Knows sessions, not servers."""
