"""What an experiment ran on: versions, the code's state, the machine."""

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from pn_fairseq import __version__


def own_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine() -> dict:
    """Describe the software and the machine of this process, in plain values that JSON can hold.

    Returns:
        ``python``, ``torch``, ``fairseq`` (name and version of the distribution that is imported as
        fairseq, None if there is none), ``pn_fairseq``: versions. ``git_commit``: the commit of the
        checkout that contains this package, with ``-modified`` appended if a tracked file differs
        from it; None outside a checkout. ``os``: name and kernel. ``cpu``: model name. ``cores``:
        how many this process may use. ``gpus``: names of the GPUs that this process sees, in order.
        ``cuda``: the version that torch was built for, None for a build without CUDA.
    """
    import torch  # takes a second, and own_cores does not need it

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fairseq": _fairseq(),
        "pn_fairseq": __version__,
        "git_commit": _git_commit(Path(__file__).resolve().parents[1]),
        "os": f"{_os_name()}, {platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": own_cores(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _fairseq() -> str | None:
    # Not `import fairseq`, which takes seconds. Several distributions provide the package.
    for name in ("fairseq-fixed", "fairseq"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return None


def _git_commit(folder: Path) -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        # The repository may only contain a copy of the package, such as an environment inside a
        # checkout.
        git("ls-files", "--error-unmatch", "__init__.py")
        modified = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-modified" if modified else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown distribution"


def _cpu_model() -> str:
    with (
        contextlib.suppress(OSError, StopIteration),
        open("/proc/cpuinfo", encoding="utf-8") as lines,
    ):
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    return platform.processor() or platform.machine()
