"""Memories of a stream: banks of features and of pixels, the search for neighbours, and buffers of images."""
