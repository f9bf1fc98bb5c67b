"""The name under which earlier versions had what ``import pn_fairseq.models`` loads."""

from pn_fairseq import models

__all__ = ["models"]
