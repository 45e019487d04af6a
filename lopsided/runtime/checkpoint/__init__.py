"""State dicts and checkpoints of pieces, that move between clusters."""
