"""Images, their domains, and the order in which they arrive. Knows nothing of methods."""
