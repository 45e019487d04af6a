"""A program on one device: ops, gathered parameters, buckets of gradients."""
