"""The guard: signals of a batch in, decisions out. It never touches the adapter."""
