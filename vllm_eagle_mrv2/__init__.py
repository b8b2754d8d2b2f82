"""EAGLE drafting for vLLM's Model Runner V2, beside the stock vLLM of a deployment."""

__version__ = "0.3.0.dev0"
