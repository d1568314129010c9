"""How generations become JSON: one module per API, each with a Shape for whole answers and for streams."""
