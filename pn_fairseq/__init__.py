"""Power Normalization and its relatives for fairseq's transformers.

The directory of this package is what ``fairseq-train --user-dir`` takes; ``python -m pn_fairseq --user-dir`` prints it.
Importing it loads neither torch nor fairseq; where fairseq is already in use, it registers its models there.
"""

import sys

__version__ = "0.1.0"

if "fairseq.models" in sys.modules:
    from pn_fairseq.errors import ending_fairseq

    with ending_fairseq():
        from pn_fairseq import models  # noqa: F401 (registers the model and its architectures)
