"""Text worlds behind one protocol, and the pool that runs them."""
