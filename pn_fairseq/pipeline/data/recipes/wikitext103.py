"""WikiText-103 for language modeling (Merity et al. 2017).

Downloads wikitext-103-v1.zip (190 MB; CC BY-SA 3.0 and GFDL) and makes the data for `pn train
wikitext103_lm`. Refuses text that does not contain 103,227,021 / 217,646 / 245,569 tokens, ends of
lines included.
"""

from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import ARCHIVE, DataFolder, LanguageModelSettings

CONFIG = "wikitext103_lm"
# Layer-scale as in ptb.py.
REPRODUCE = Experiment(
    CONFIG, "wt103", (1,), ("tensorized_lm",), ("ln", "bn+layer_scale_groups=1", "pnv", "pn")
)
OPTIONS = ARCHIVE

# The address in the paper (s3.amazonaws.com/research.metamind.io) died in February 2024.
URL = "https://wikitext.smerity.com/wikitext-103-v1.zip"
# The checksum that dataset catalogues list for the file at the dead address.
SHA256 = "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
MEMBERS = [f"wikitext-103/wiki.{split}.tokens" for split in ("train", "valid", "test")]
TOKENS = (103227021, 217646, 245569)


def settings(options) -> LanguageModelSettings:
    return LanguageModelSettings(corpus="WikiText-103")


def prepare(data: DataFolder, options) -> None:
    (file,) = data.published({URL: SHA256})
    language_model.prepare(data, data.unpack(file, MEMBERS), TOKENS)
