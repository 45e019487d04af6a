"""A cable that takes its time, for kernels without netem. Started by lab.py, as root.

In: a network namespace, cables with their delays. Out: for a cable `t1` the devices `t1` and `t1-` in that namespace.
What leaves one comes out of the other so much later, in order, and nothing is lost. `ready` is printed when they are
there. The one idea: frames pass through this process whole and unread, with what the kernel has yet to do to them
(checksums, segments), so that a frame costs two system calls however large it is.

python lab_delay.py NETNS CABLE=MILLISECONDS...        (until its standard input ends)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import threading
import time
from queue import SimpleQueue

import lab_host

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUMS, SEGMENTS = 0x01, 0x02 | 0x04
LARGEST_FRAME = 1 << 17


def device(name: str) -> int:
    """An Ethernet device whose cable is in the hands of this process."""
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(handle, TUNSETOFFLOAD, CHECKSUMS | SEGMENTS)
    return handle


def carry(source: int, target: int, delay_s: float) -> None:
    """Start to carry frames one way."""
    under_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def pick_up() -> None:
        while True:
            frame = os.read(source, LARGEST_FRAME)
            under_way.put((time.monotonic() + delay_s, frame))

    def put_down() -> None:
        while True:
            due, frame = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with contextlib.suppress(OSError):  # the other end is down
                os.write(target, frame)

    for end in (pick_up, put_down):
        threading.Thread(target=end, daemon=True).start()


def main() -> None:
    netns, *cables = sys.argv[1:]
    lab_host.enter_network(netns)
    # Before the hosts, or frames would wait until a host that shares the core has used up its slice.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    for cable in cables:
        name, _, milliseconds = cable.partition("=")
        near, far = device(name), device(f"{name}-")
        for source, target in ((near, far), (far, near)):
            carry(source, target, float(milliseconds) / 1e3)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
