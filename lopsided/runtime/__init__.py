"""The runtime: a plan becomes a training run on `torch.distributed`, one process a device."""
