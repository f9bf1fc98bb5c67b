"""The English verses for language modeling: the corpus that is in the repository, split by book.

Checks data/verses.es-en against its checksums, puts its English verses in the order of the text and splits them by
book: validation is Ezekiel, test is Daniel to Malachi, train is the other 52 books. Tokenizes as Moses does and
lower-cases; words that occur once or twice in train become <unk>. The data is for `pn train verses_lm_en`.
"""

from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.preparation import Preparation
from pn_fairseq.pipeline.data.recipes import verses

CONFIG = "verses_lm_en"
OPTIONS = ()


def prepare(data: Preparation) -> None:
    folder = verses.corpus()
    data.open(CONFIG)
    texts = language_model.verses(folder, data.partial / "unpacked")
    language_model.prepare(data, "verses", texts, tokenize="en", lower=True, min_count=3)
