"""Imported by every Python that has this folder on its PYTHONPATH: kill its process group at one renaming of a file.

A renaming is where a step replaces a file or a folder by a whole one. KILL_COUNT is a file that grows by a byte with
each renaming of any process; at number KILL_AT, before it is done, comes SIGKILL.
"""

import os
import signal
import sys


def count(event: str, arguments: tuple) -> None:
    if event == "os.rename":
        with open(os.environ["KILL_COUNT"], "ab", buffering=0) as file:
            file.write(b".")
            if file.tell() == int(os.environ["KILL_AT"]):
                os.killpg(0, signal.SIGKILL)


sys.addaudithook(count)
