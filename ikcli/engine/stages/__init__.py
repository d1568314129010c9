"""A model over several processes or machines: stages of consecutive layers between which rows of activations go."""
