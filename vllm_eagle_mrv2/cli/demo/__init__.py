"""``vllm-eagle-mrv2 demo``."""
