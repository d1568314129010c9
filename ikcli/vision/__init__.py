"""Images for models that read them: decode, resize as the model's processor does, encode with a projector file."""
