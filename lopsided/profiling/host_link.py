"""How fast a device fetches what lies in the memory of its host, and takes it back: optimizer state may be kept there.

In: a device. Out: bytes a second, one way, of pinned memory (`measure_host_link`); 0 for a device whose memory is the
host's own. All processes measure at once, as they fetch at once in training: devices that share a bus share it here.
"""

from __future__ import annotations

import statistics
import time

import torch

from lopsided.cluster.coefficients import KIND, coefficient

_BYTES = 64 * 2**20
"""What optimizers' steps fetch at a time."""
_LOOKS = 5


def measure_host_link(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    here = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for look in range(_LOOKS + 1):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)
        if look:  # the first one makes ready
            seconds.append(time.perf_counter() - started)
    return coefficient(KIND, "host_bytes_per_s").clamp(2 * _BYTES / statistics.median(seconds))
