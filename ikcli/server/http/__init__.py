"""HTTP layer of `ik serve`: the endpoints and JSON of llama-server (both forks) on top of ikcli.server.slots."""
