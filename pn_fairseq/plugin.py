"""The name that earlier versions gave to what ``import pn_fairseq.models`` loads."""

from pn_fairseq import models

__all__ = ["models"]
