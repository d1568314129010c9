"""One file per architecture over shared blocks."""
