"""Runs inside a sandbox: tries to reach things and prints, as JSON, which of them answered and how it was refused.

Usage: python3 - '[["tcp", "10.0.0.1", 80], ["udp", "10.0.0.1", 53], ["dns", "example.com"], ["unix", "/path"], ...]'
"""

import fcntl
import json
import os
import socket
import stat
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

LIMIT_S = 2.0


def tcp(host, port):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect((host, port))


def udp(host, port):
    """A question for a name server, which anything that speaks UDP may answer or not: sending must fail already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(LIMIT_S)
        sock.sendto(b"\x12\x34\x01\x00\x00\x01\0\0\0\0\0\0\x07example\x03com\0\0\x01\0\x01", (host, port))
        sock.recv(1024)


def dns(name):
    socket.getaddrinfo(name, 80)


def unix(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(LIMIT_S)
        sock.connect(path)


def raw(host):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as sock:
        sock.sendto(b"\x08\x00\xf7\xff\0\0\0\0", (host, 0))


def packet(interface):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((interface, 0))


def vsock(cid):
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM):
        pass


def netlink(message, body=""):
    """An rtnetlink request that changes something; answers "done" only when the kernel did it."""
    payload = bytes.fromhex(body)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.send(struct.pack("=IHHII", 16 + len(payload), message, 5, 1, 0) + payload)
        (error,) = struct.unpack_from("=i", sock.recv(8192), 16)
    if error:
        raise OSError(-error, "refused")


def tunnel(path):
    """A TAP interface, where the device node can be made at all."""
    if not os.path.exists(path):
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
    with open(path, "r+b", buffering=0) as device:
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"out", 0x1002))


def attempt(target):
    kind, *arguments = target
    try:
        globals()[kind](*arguments)
    except OSError as error:
        return [target, False, f"{type(error).__name__}: {error}"]
    return [target, True, ""]


if __name__ == "__main__":
    with ThreadPoolExecutor(64) as pool:
        print(json.dumps(list(pool.map(attempt, json.loads(sys.argv[1])))))
