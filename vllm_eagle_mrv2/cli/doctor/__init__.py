"""``vllm-eagle-mrv2 doctor``."""
