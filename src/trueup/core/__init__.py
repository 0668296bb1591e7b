"""The adapter: the flow of a batch, the state that it changes, and the base class of methods."""
