"""Source models: networks by name, trained or loaded, kept as checkpoints that say how they were made."""
