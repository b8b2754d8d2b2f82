"""``vllm-eagle-mrv2 bench-load``."""
