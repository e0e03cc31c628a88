"""An HTTP worker that says it serves, and ends; or, told to, ends at once."""

import socket
import sys

import msgspec

from drumline.frontend.workers.messages import Serving
from drumline.frontend.workers.settings import decode_settings

settings = decode_settings(sys.stdin.buffer.readline())
if "--serves" in sys.argv:
    body = msgspec.msgpack.encode(Serving())
    with socket.socket(fileno=settings.channel_fd) as channel:
        channel.sendall(len(body).to_bytes(4, "big") + body)
sys.exit(7)
