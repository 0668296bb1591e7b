"""The statistics that BatchNorm layers normalise with."""
