"""What tensor bytes mean: formats, decoding, encoding."""
