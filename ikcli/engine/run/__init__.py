"""A planned run: devices, runner, session, sequences, embeddings."""
