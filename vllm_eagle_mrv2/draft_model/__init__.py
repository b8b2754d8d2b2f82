"""Replacements for layers of the draft model."""
