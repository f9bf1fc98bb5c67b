"""``server.py SOCKET``: fork a process for each request of client.py. Ends when its standard input does."""

import atexit
import contextlib
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import traceback

#: Imported before the first program is forked. torch imports its _dynamo for the first model.
MODULES = ("fairseq_cli.generate", "fairseq_cli.preprocess", "fairseq_cli.train", "torch._dynamo")


def program(argv: list[str]) -> None:
    """As the interpreter runs ``-c CODE``, ``-m MODULE`` or a console script of fairseq."""
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(argv[1], {"__name__": "__main__"})
    elif argv[0] == "-m":
        if argv[1] == "pn_fairseq":  # it has not imported fairseq yet, which configures logging
            logging.getLogger().handlers.clear()
            logging.getLogger().setLevel(logging.WARNING)
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        module = argv[0].removeprefix("fairseq-").replace("-", "_")
        sys.exit(importlib.import_module(f"fairseq_cli.{module}").cli_main())


def run(request: dict) -> int:
    """Run the program in this process; its exit code."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = filter(None, request["env"].get("PYTHONPATH", "").split(":"))
    sys.executable = shutil.which("python")  # what it starts is warm, too
    try:
        program(request["argv"])
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


def serve(connection: socket.socket) -> None:
    """In a process of its own: fork the program, and wait for it or for the end of the client."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as file:
        request = json.loads(file.read(int.from_bytes(head, "little")))
    child = os.fork()
    if not child:
        connection.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.setsid()
        os._exit(run(request) & 255)
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended in ready:
        connection.send(bytes([status if status >= 0 else 128 - status]))


def main() -> None:
    sys.path.pop(0)  # this folder
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen()
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if listener not in ready:
            return
        connection, _ = listener.accept()
        for module in MODULES:
            importlib.import_module(module)
        if not os.fork():
            listener.close()
            serve(connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
