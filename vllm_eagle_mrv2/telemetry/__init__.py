"""Counters, metrics and the start-up line, for the operator."""
