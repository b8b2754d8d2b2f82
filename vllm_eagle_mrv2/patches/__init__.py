"""What of vLLM's is replaced, and by what."""
