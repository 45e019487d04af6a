"""A PyTorch model and a batch → `Graph`."""
