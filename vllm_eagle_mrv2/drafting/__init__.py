"""The draft loop and its CUDA graphs."""
