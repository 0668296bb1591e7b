"""Memories of a stream: features per class, pixels, whole images, and the search for neighbours."""
