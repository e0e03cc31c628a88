"""Two network namespaces joined by a cable that delays what it carries, and can be cut.

The cable is a TUN device in each and a thread that carries packets from one to the other, so
that neither a kernel module for delays nor any setting of this machine's network is needed.
"""

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from concurrent.futures import Future

import pytest

TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_LONGEST = 65536

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists(TUN),
    reason=f"two machines need root, ip (iproute2) and {TUN}",
)


def inside(namespace, act):
    """Return what `act` returns on a thread of its own, whose sockets are the namespace's."""
    done = Future()

    def run():
        try:
            with open(f"/run/netns/{namespace}") as place:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done.result()


class Cable:
    """Machines named `near` and `far`, with one address each. As a context it lays them out."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.names = [f"drumline{os.getpid()}{end}" for end in ("near", "far")]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.carried = 0
        self._cut = False
        self._over = False
        self._ends = []
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def prefix(self, machine):
        """Return what begins a command that runs on a machine."""
        return ("ip", "netns", "exec", self.names[machine])

    def cut(self):
        self._cut = True

    def __enter__(self):
        try:
            for machine, name in enumerate(self.names):
                _ip("netns", "add", name)
                self._ends.append(inside(name, _tun))
                _ip("-n", name, "link", "set", "lo", "up")
                own, other = self.addresses[machine], self.addresses[1 - machine]
                _ip("-n", name, "addr", "add", own, "peer", other, "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "mtu", "32768", "up")
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over = True
        self._thread.join(5)
        self._close()

    def _close(self):
        for end in self._ends:
            os.close(end)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _carry(self):
        under_way = []
        while not self._over:
            wait_s = 0.2
            if under_way:
                wait_s = min(wait_s, max(under_way[0][0] - time.monotonic(), 0))
            ready, _, _ = select.select(self._ends, [], [], wait_s)
            now = time.monotonic()
            for end in ready:
                packet = os.read(end, _LONGEST)
                self.carried += 1
                other = self._ends[1 - self._ends.index(end)]
                heapq.heappush(under_way, (now + self.delay_s, self.carried, other, packet))
            while under_way and under_way[0][0] <= now:
                _, _, end, packet = heapq.heappop(under_way)
                if not self._cut:
                    os.write(end, packet)


def _tun():
    end = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"cable", _IFF_TUN | _IFF_NO_PI))
    return end


def _ip(*words):
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr}")
