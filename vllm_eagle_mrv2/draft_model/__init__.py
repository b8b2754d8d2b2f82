"""The draft model's layers, where ours take their place."""
