"""Triton kernels of the draft loop, one file each, each with its plain-torch reference beside it."""
