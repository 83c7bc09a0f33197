"""Collecting episodes: engines, chat rendering, the collector and the writing of tips."""
