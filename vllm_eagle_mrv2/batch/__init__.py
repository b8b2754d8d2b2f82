"""The draft's input batch and its transfer to the GPU."""
