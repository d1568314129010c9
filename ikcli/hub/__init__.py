"""Get models by name, from repositories of a Hugging Face hub or from URLs; cache, list and remove them."""
