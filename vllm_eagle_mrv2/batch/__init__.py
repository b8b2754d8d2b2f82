"""A batch on its way to the draft."""
