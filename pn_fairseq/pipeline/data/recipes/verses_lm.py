"""The English verses for language modeling: the corpus that is in the repository, split by book.

Checks data/verses.es-en against its checksums, puts its English verses in the order of the text and splits them by
book: validation is Ezekiel, test is Daniel to Malachi, train is the other 52 books. Tokenizes as Moses does and
lower-cases; words that occur once or twice in train become <unk>. With --unit byte the text stays as it is, and DIR is
verses_lm_en_bytes. The data is for `pn train verses_lm_en`.
"""

from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.preparation import Preparation
from pn_fairseq.pipeline.data.recipes import verses

CONFIG = "verses_lm_en"
OPTIONS = (language_model.UNIT,)


def prepare(data: Preparation, unit: str) -> None:
    folder = verses.corpus()
    words = {"tokenize": "en", "lower": True, "min_count": 3} if unit == "word" else {}
    data.open(CONFIG if unit == "word" else f"{CONFIG}_{unit}s")
    texts = language_model.verses(folder, data.partial / "unpacked")
    language_model.prepare(data, "verses", texts, unit=unit, **words)
