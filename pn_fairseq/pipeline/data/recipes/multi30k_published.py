"""Multi30k English-German, text and settings of a published score: 41.02 BLEU of a Transformer-Tiny
(Wu et al. 2021).

Reads train, valid, test.2016 and test.2017 in both languages (train.en, ..., plain or .gz) and
bpe-codes from --corpus: Moses' tokens, lower-cased, in subwords, from data/multi30k-en-de of the
authors' public repository LividWo/Revisit-MMT, where bpe-codes is called code. The makers of
Multi30k ask that it be used for research and education only, and it is not downloaded. The text,
which is not changed, is for `pn train multi30k_en_de_tiny`. The subset test is test.2016, to which
the published score refers, and test1 is test.2016 and test.2017 together. Expected: 29,000 training
and 1,014 validation pairs, 1,000 in each test set.
"""

from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import CORPUS, DataFolder, Settings
from pn_fairseq.pipeline.data.settings import NONE

CONFIG = "multi30k_en_de_tiny"
# The published model is fairseq's own, post-norm.
_POST_NORM = "ln+encoder_norm_placement=post+decoder_norm_placement=post"
REPRODUCE = Experiment(
    CONFIG, "tiny", norms=(_POST_NORM, "ln", "pn", "bn"), subsets=("test", "test1")
)
OPTIONS = CORPUS

#: Subset -> its files, and the number of their pairs.
CONTENT = {
    "train": (["train"], 29000),
    "valid": (["valid"], 1014),
    "test": (["test.2016"], 1000),
    "test1": (["test.2016", "test.2017"], 2000),
}


def settings(options) -> Settings:
    return Settings(source="en", target="de", lower=True, tokenizer=NONE, bpe=10000)


def prepare(data: DataFolder, options) -> None:
    data.splits = [*CONTENT]
    texts = {}
    for subset, (names, _) in CONTENT.items():
        files = [f"{name}.{lang}" for name in names for lang in ("en", "de")]
        texts[subset] = [options.corpus / file for file in files]
    expect = [count for _, count in CONTENT.values()]
    data.prepare_texts(texts, expect, options.corpus / "bpe-codes")
