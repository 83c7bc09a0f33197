"""From episodes to fixed-shape training batches, in numpy."""
