"""The advice for ``--user-dir CHECKOUT``: the plugin is the folder ``pn_fairseq`` in the checkout.

fairseq imports the modules in ``models/`` of the folder that ``--user-dir`` names. For a checkout that is itself called
``pn_fairseq`` this name leads to the package's own module of the same name, and ``--user-dir CHECKOUT`` works.
"""

import sys
from pathlib import Path

checkout = Path(__file__).resolve().parent.parent
program = Path(sys.argv[0]).name
print(f"{program}: error: --user-dir {checkout} is the checkout; give {checkout / 'pn_fairseq'}", file=sys.stderr)
raise SystemExit(2)
