"""``client.py SOCKET PROGRAM ARGUMENT...``: have the server run a program, and end with its exit code."""

import json
import os
import socket
import sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
request = json.dumps({"argv": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
socket.send_fds(connection, [len(request).to_bytes(8, "little")], [0, 1, 2])
connection.sendall(request)
code = connection.recv(1)
os._exit(code[0] if code else 1)
