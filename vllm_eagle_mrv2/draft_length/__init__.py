"""Chooses the number of draft tokens at run time: what is accepted, what an iteration takes, and which number pays."""
