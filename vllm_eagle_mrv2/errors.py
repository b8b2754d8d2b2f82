"""The one exception that a user of ``eagle_mrv2`` meets."""


class EagleMRV2Error(ValueError):
    """The request cannot be served; the message is one sentence with the cause and the remedy."""
