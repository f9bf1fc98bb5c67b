"""The shared suite on the norms of this package. A user runs it on other norms: pn test-norms."""

from pn_fairseq.testing.test_norms import *  # noqa: F403
