"""Moved to :mod:`pn_fairseq.pipeline.command`."""

from pn_fairseq.pipeline.command import ArgumentParser, UserError, command, without_fairseqs_log  # noqa: F401
