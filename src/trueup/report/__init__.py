"""Tables and figures, made of records alone."""
