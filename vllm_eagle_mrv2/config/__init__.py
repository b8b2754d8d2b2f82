"""The user's settings, and what the checkpoints say about themselves."""
