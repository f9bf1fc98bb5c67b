"""Moved to :mod:`pn_fairseq.pipeline.training_log`."""

from pn_fairseq.pipeline.training_log import *  # noqa: F403
