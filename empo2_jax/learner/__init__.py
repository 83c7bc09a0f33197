"""The update: optimizer, state and one jitted step."""
