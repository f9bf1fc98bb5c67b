"""The Penn Treebank for language modeling (Mikolov et al. 2011), from a local folder.

Reads ptb.train.txt, ptb.valid.txt and ptb.test.txt from --corpus, as in Mikolov's
simple-examples.tgz (data/), with 10,000 words and <unk>, for `pn train ptb_lm`. The licence of the
text, LDC99T42, does not allow distribution: it is neither in this repository nor downloaded.
Refuses text that does not contain 929,589 / 73,760 / 82,430 tokens, ends of lines included.
"""

from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import CORPUS, DataFolder, LanguageModelSettings

CONFIG = "ptb_lm"
# The paper uses layer-scale "in each model setting"; it would not change LN and GN, and PN-V and PN
# use it by default.
_SCALED = tuple(f"{norm}+layer_scale_groups=1" for norm in ("bn", "brn", "mabn"))
REPRODUCE = Experiment(CONFIG, "ptb", (1,), ("tensorized_lm",), ("ln", "gn", *_SCALED, "pnv", "pn"))
OPTIONS = CORPUS

FILES = [f"ptb.{split}.txt" for split in ("train", "valid", "test")]
TOKENS = (929589, 73760, 82430)


def settings(options) -> LanguageModelSettings:
    return LanguageModelSettings(corpus="PTB")


def prepare(data: DataFolder, options) -> None:
    language_model.prepare(data, [options.corpus / name for name in FILES], TOKENS)
