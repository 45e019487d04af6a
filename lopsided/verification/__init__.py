"""Programs against one device: simulated, at random, and on real processes."""
