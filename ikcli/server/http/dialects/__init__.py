"""Other APIs: how their requests become chat completion requests."""
