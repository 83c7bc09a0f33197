"""What is learned from episodes: one short file per algorithm."""
