"""Execute a planned run: devices, runner, session, sequences, embeddings."""
