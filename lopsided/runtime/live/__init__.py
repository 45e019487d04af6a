"""Shares that follow the pace of devices while training."""
