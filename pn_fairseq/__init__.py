"""Power Normalization and its relatives for fairseq's transformers.

``fairseq-train --user-dir`` expects the directory of this package, which ``pn --user-dir`` prints.
Importing the package loads neither torch nor fairseq and changes nothing, unless fairseq is already
in use: then it also loads :mod:`pn_fairseq.models`.
"""

import sys

__version__ = "0.1.0"

if "fairseq.models" in sys.modules:
    from .common.errors import Unavailable, one_line_errors

    with one_line_errors(Unavailable):
        if __name__ != "pn_fairseq":  # the modules import each other by this name
            raise Unavailable(
                f"--user-dir {__path__[0]}: the folder must be called pn_fairseq; rename it"
            )
        from pn_fairseq import models  # noqa: F401 (registers the models, applies the patches)
