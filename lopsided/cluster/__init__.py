"""What a model is trained on: devices, links, files that describe them, and what collectives cost."""
