"""A network seen as features and a head, and how it is run."""
