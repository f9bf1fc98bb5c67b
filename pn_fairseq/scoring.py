"""Moved to :mod:`pn_fairseq.pipeline.scoring`."""

from pn_fairseq.pipeline.scoring import *  # noqa: F403
