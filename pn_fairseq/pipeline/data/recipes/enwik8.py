"""enwik8 for language modeling of bytes: the first 100,000,000 bytes of a dump of the English
Wikipedia of 2006.

Downloads enwik8.zip (36 MB) and makes the data for `pn train enwik8_lm`: the first 90,000,000 bytes
are for training, then 5,000,000 for validation and 5,000,000 for the test (Chung et al. 2017). A
token is a byte; a split that ends within a line gets one more end of line. Needs about 1 GB.
"""

from pn_fairseq.common.command import UserError
from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import ARCHIVE, DataFolder, LanguageModelSettings

CONFIG = "enwik8_lm"
REPRODUCE = Experiment(
    CONFIG, "base", (1,), ("transformer_lm",), ("none", "ln", "lns", "dn", "ada")
)
OPTIONS = ARCHIVE

URL = "http://mattmahoney.net/dc/enwik8.zip"
# The checksum that dataset catalogues list.
SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
SIZES = (90_000_000, 5_000_000, 5_000_000)


def settings(options) -> LanguageModelSettings:
    return LanguageModelSettings(corpus="enwik8", unit="byte")


def prepare(data: DataFolder, options) -> None:
    (file,) = data.published({URL: SHA256})
    (whole,) = data.unpack(file, ["enwik8"])
    size = whole.stat().st_size
    if size != sum(SIZES):
        raise UserError(f"this is not enwik8: it has {size:,} bytes, and enwik8 has {sum(SIZES):,}")
    texts = [whole.with_name(split) for split in SPLITS]
    with whole.open("rb") as source:
        for text, size in zip(texts, SIZES, strict=True):
            text.write_bytes(source.read(size))
    language_model.prepare(data, texts)
