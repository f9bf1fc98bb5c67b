"""The common part of all models with these norms: averaging statistics, logging diagnostics,
folding for decoding.
"""

import logging

import torch

from pn_fairseq.common.errors import FoldedModelError
from pn_fairseq.fairseq_patches.diagnostics_log import DiagnosticsLog
from pn_fairseq.models.norm_options import NormOptions
from pn_fairseq.norms import running_norms
from pn_fairseq.norms.conversion.convert import named_norms
from pn_fairseq.norms.conversion.future_tokens import in_decoders, leak

#: Name of a buffer that marks the weights of a folded model.
FOLDED_MARK = "norms_folded"


class NormedModel:
    """Mixin; must precede fairseq's class in the bases of a model, whose ``__init__`` ends with
    :meth:`use_norms`.
    """

    def use_norms(self, norms: NormOptions) -> None:
        #: Whether :mod:`pn_fairseq.fairseq_patches.training` averages the model's statistics over
        #: the ranks.
        self.averages_norm_stats = not norms.no_average_norm_stats
        interval = norms.norm_stats_interval
        self.diagnostics_log = DiagnosticsLog(running_norms(self), interval) if interval else None
        self.norm_probe = None
        if norms.norm_probe and not norms.norms_folded:
            from pn_fairseq.models.norm_probe import NormProbe  # imports pyarrow

            self.norm_probe = NormProbe(
                self, norms.norm_probe, norms.norm_probe_interval, norms.norm_probe_layers
            )
        #: Whether the norms are folded into the projections that follow them; such a model can only
        #: decode.
        self.folded = norms.norms_folded
        self._compiles_layers = norms.compile_layers
        self._has_told_of_leak = False
        if self.folded:
            self.register_buffer(FOLDED_MARK, torch.ones((), dtype=torch.int64))
            self.eval()

    def train(self, mode: bool = True):
        if mode and self.folded:
            raise FoldedModelError()
        if mode and not self._has_told_of_leak:
            self._has_told_of_leak = True
            self._tell_of_leak()
        return super().train(mode)

    def _tell_of_leak(self) -> None:
        norms = named_norms(self)
        names = in_decoders(self, norms)
        if names:
            logging.getLogger(__name__).warning(
                f"{leak(names, norms[names[0]])} --decoder-norm layer, for example, never mixes "
                "tokens; docs/norms.md (Properties) says which norms do."
            )

    def compile_layers(self) -> None:
        """Compile each layer in place, once, if ``--compile-layers`` is set.

        Training calls this; a model that only decodes is not compiled.
        """
        if not self._compiles_layers:
            return
        self._compiles_layers = False
        for name in ("encoder", "decoder"):
            side = getattr(self, name, None)
            for layer in getattr(side, "layers", ()):
                layer.compile(dynamic=True)
                side.layers_are_compiled = True

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        if FOLDED_MARK in state_dict and not self.folded:
            raise FoldedModelError()
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    def set_num_updates(self, num_updates: int) -> None:
        if self.norm_probe is not None:
            self.norm_probe.refuse_without_patches()
        super().set_num_updates(num_updates)
