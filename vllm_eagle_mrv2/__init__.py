"""EAGLE drafting for vLLM's Model Runner V2, beside the stock vLLM of a deployment."""

__version__ = "0.2.0"
