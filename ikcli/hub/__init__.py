"""Models by name: repositories of a Hugging Face hub and URLs, downloaded into a cache, listed and removed there."""
