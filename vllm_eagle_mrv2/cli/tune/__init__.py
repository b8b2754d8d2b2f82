"""``vllm-eagle-mrv2 tune``."""
