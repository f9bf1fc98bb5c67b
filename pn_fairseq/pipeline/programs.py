"""Python programs that a command starts beside itself."""

import subprocess
import sys


def start_python(*words: object, **options) -> subprocess.Popen:
    """Start ``python WORDS`` with the interpreter of this process.

    Args:
        words: the interpreter's arguments, such as ``"-m", "pn_fairseq", "report"``.
        options: for ``subprocess.Popen``.
    """
    return subprocess.Popen([sys.executable, *map(str, words)], **options)
