"""Versioned weights between the trainer and its engines."""
