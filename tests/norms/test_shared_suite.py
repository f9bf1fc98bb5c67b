"""The shared suite on the norms of this package. A user runs it on other norms: python -m pn_fairseq test-norms."""

from pn_fairseq.testing.test_norms import *  # noqa: F403
