"""Weights from the learner to the engines."""
