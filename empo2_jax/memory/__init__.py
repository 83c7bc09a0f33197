"""Tips and novelty: what is remembered, and how it is found again."""
