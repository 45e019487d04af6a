"""`parallelize`: a plan on `torch.distributed`, one process a device."""
