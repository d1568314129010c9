"""Text and conversations in a terminal, with an engine in this process or a running server."""
