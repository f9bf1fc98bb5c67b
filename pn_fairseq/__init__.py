"""Power Normalization and its relatives for fairseq's transformers.

The directory of this package is what ``fairseq-train --user-dir`` takes; ``python -m pn_fairseq --user-dir`` prints it.
``pn_fairseq.norms`` needs torch alone, so fairseq is imported only where it is already in use.
"""

import sys

from pn_fairseq.checkpoints import allow_fairseq_checkpoints
from pn_fairseq.errors import ending_fairseq

__version__ = "0.1.0"

allow_fairseq_checkpoints()

if "fairseq.models" in sys.modules:
    with ending_fairseq():
        from pn_fairseq import models  # noqa: F401 (registers the model and its architectures)
