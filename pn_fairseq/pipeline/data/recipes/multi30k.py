"""Multi30k German-English, captions of pictures, from a local folder.

Takes train, valid and a test set of Multi30k in both languages from --corpus (train.de, train.en, valid.de, valid.en,
test2016.de, test2016.en, one sentence a line, UTF-8, plain or .gz). Its makers ask that it be used for research and
education only, and it is not downloaded. Expected: 29,000 training and 1,014 validation pairs, 1,000 in test2016 and in
test2017. Makes the data for `pn train multi30k_de_en`, tokenized and lower-cased.
"""

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data.preparation import CORPUS, Option, Preparation, bpe, need_text

CONFIG = "multi30k_de_en"
# The scripts of the corpus' repository (multi30k/dataset) lower-case, too, and leave the number of merges to their
# user; this is IWSLT14's.
OPTIONS = (
    CORPUS,
    Option("--test", "NAME", "the test set: test2016 (default), test2017, ...; DIR is multi30k_de_en_NAME", "test2016"),
    bpe(10000),
)


def prepare(data: Preparation, corpus: str, test: str, bpe: str) -> None:
    if not test or "/" in test:
        raise UserError(f"--test must be the name of a test set in {corpus}, such as test2016, not '{test}'")
    files = [f"{split}.{lang}" for split in ("train", "valid", test) for lang in ("de", "en")]
    name = CONFIG if test == "test2016" else f"{CONFIG}_{test}"
    folder = need_text(corpus, *files)
    data.begin(name, source="de", target="en", lower=1, bpe=bpe)
    data.take_folder(folder, test, expect=[29000, 1014, *([1000] if test in ("test2016", "test2017") else [])])
    data.tokenize("raw", "tok")
    data.segment()
    data.binarize()
