"""What an operator sees: counters, metrics, the start-up line."""
