"""Multi30k German-English, captions of pictures, from a local folder.

Reads train, valid and a test set of Multi30k in both languages from --corpus (train.de, train.en,
valid.de, valid.en, test2016.de, test2016.en, one sentence per line, UTF-8, plain or .gz). Its
makers ask that it be used for research and education only, and it is not downloaded. Expected:
29,000 training and 1,014 validation pairs, 1,000 in test2016 and in test2017. Makes the data for
`pn train multi30k_de_en`, tokenized and lower-cased.
"""

from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import CORPUS, DataFolder, Settings, bpe

CONFIG = "multi30k_de_en"
REPRODUCE = Experiment(CONFIG, "tiny")
# The scripts of the corpus' repository (multi30k/dataset) also lower-case, and leave the number of
# merges to the user; this number is IWSLT14's.
TEST = "the test set: test2016 (default), test2017, ...; DIR is multi30k_de_en_NAME"
OPTIONS = CORPUS | {"--test": {"metavar": "NAME", "default": "test2016", "help": TEST}} | bpe(10000)


def folder(options) -> str:
    return CONFIG if options.test == "test2016" else f"{CONFIG}_{options.test}"


def settings(options) -> Settings:
    return Settings(source="de", target="en", lower=True, bpe=options.bpe)


def prepare(data: DataFolder, options) -> None:
    expect = (29000, 1014, 1000 if options.test in ("test2016", "test2017") else 0)
    data.prepare_folder(options.corpus, options.test, expect)
