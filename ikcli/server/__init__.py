"""The HTTP server: `engine/` runs the model in a thread of its own, `http/` speaks to clients, `web/` is the page."""
