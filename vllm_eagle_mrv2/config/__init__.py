"""What the user asked for, and what their checkpoints say."""
