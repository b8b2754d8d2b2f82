"""What `bench-load` and `tune` share: the load that engines get, and how they serve it."""
