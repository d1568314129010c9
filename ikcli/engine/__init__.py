"""Plan a run of a model, and run it."""
