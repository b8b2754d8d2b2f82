"""A Triton backend named ``cpu`` for test environments without a GPU.

vLLM's CPU build enables Model Runner V2 only if Triton lists a backend of this name. The backend compiles nothing: with
``TRITON_INTERPRET=1``, which the ``.pth`` file beside this package sets, kernels run in Triton's own interpreter.
"""
