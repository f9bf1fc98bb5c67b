"""IWSLT15 English-Vietnamese, TED talks as Stanford's NMT group published them, tokenized.

Training 133,317 pairs, validation tst2012 (1,553), test tst2013 (1,268). Downloads 38 MB and makes
the data for `pn train iwslt15_en_vi`: DIR/tok contains the tokens as published, case kept, and
DIR/raw the detokenized text.
"""

from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import ARCHIVE, DataFolder, Settings, bpe
from pn_fairseq.pipeline.data.pairs import tokens
from pn_fairseq.pipeline.data.settings import WITHOUT_FINAL_STOP

CONFIG = "iwslt15_en_vi"
REPRODUCE = Experiment(CONFIG, "iwslt")
# No published recipe uses BPE; 10,000 is IWSLT14's number, for a corpus of the same kind and size.
OPTIONS = ARCHIVE | bpe(10000)

URL = "https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi"
#: Split -> the published file, and its number of pairs.
SPLITS = {"train": ("train", 133317), "valid": ("tst2012", 1553), "test": ("tst2013", 1268)}
URLS = [f"{URL}/{name}.{lang}" for name, _ in SPLITS.values() for lang in ("en", "vi")]


def settings(options) -> Settings:
    # The tokenizer of the published text. Nothing is tokenized here.
    return Settings(
        source="en",
        target="vi",
        tokenizer=WITHOUT_FINAL_STOP,
        bpe=options.bpe,
        separate_dictionaries=True,
    )


def prepare(data: DataFolder, options) -> None:
    # 1. The published tokens, unchanged (DEST/text/tokens): they were tokenized as by Moses'
    # scripts, with ' as &apos; and so on, and published BLEU scores compare such tokens. sacreBLEU
    # and chrF need plain text (DEST/text): the nearest is what the detokenizer for translations
    # makes of the reference.
    files = data.published(dict.fromkeys(URLS, ""))
    if files:
        for number, (split, (_, count)) in enumerate(SPLITS.items()):
            data.take(tokens, split, files[2 * number : 2 * number + 2], count, to="tokens")
        data.detokenize("partial/text/tokens", "partial/text")
    if not data.begin("text"):
        return
    data.transform("copying", "text", "raw", lambda *_: bytes)
    data.transform("copying", "text/tokens", "tok", lambda *_: bytes)

    # 2. Subwords and binary data: DEST/bpe, DEST/bin. The AdaNorm paper mentions "input and output
    # vocabularies".
    data.segment()
    data.binarize()
