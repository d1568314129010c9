"""The HTTP side of `ik serve`: endpoints and JSON of llama-server (both forks) over ikcli.server.slots."""
