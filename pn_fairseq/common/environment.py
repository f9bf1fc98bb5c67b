"""The environment variable that turns off the patches of fairseq."""

import os

SWITCH = "PN_FAIRSEQ_NO_PATCHES"


def patches_enabled() -> bool:
    """Whether the environment leaves the patches of fairseq on."""
    return os.environ.get(SWITCH, "0") in ("", "0")
