"""The shared suite on the norms of this package. A user runs it on other norms: pn test-norms."""

from pn_fairseq.testing.helpers import pytest_generate_tests  # noqa: F401
from pn_fairseq.testing.test_evaluation import *  # noqa: F403
from pn_fairseq.testing.test_module import *  # noqa: F403
from pn_fairseq.testing.test_padding import *  # noqa: F403
from pn_fairseq.testing.test_ranks import *  # noqa: F403
from pn_fairseq.testing.test_recomputation import *  # noqa: F403
from pn_fairseq.testing.test_state import *  # noqa: F403
