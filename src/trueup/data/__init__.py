"""Datasets, domains and streams. Imports no method."""
