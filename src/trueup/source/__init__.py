"""Source models: networks by name, trained or loaded, saved as checkpoints that hold their recipe."""
