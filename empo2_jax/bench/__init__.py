"""`empo2 bench`: speed, memory and exactness against peers, every speed with the proof that both computed the same."""
