"""Text of your own for language modeling: three files, train.txt, valid.txt and test.txt.

Reads train.txt, valid.txt and test.txt from --corpus (one sentence or paragraph per line, UTF-8,
plain or .gz). A token in counts.txt is a word, or with --unit byte a byte, or the end of a line.
"""

from pn_fairseq.common.command import UserError, whole
from pn_fairseq.pipeline.data import language_model
from pn_fairseq.pipeline.data.binarize import SPLITS
from pn_fairseq.pipeline.data.folder import CORPUS, DataFolder, LanguageModelSettings
from pn_fairseq.pipeline.data.settings import NONE, SACREMOSES

CONFIG = ""
TRAIN = "own_text_lm"  # the configuration that pn prepare advises
SPLIT = "split punctuation as Moses does for this language (default: the text consists of tokens)"
RARE = "words that are rarer in train become <unk> (default 1)"
OPTIONS = {
    **CORPUS,
    "--tokenize": {"metavar": "LANG", "default": "", "help": SPLIT},
    "--lower": {"action": "store_true", "help": "lower-case"},
    **language_model.UNIT,
    "--min-count": {"metavar": "N", "type": whole, "default": 1, "help": RARE},
}


def settings(options) -> LanguageModelSettings:
    if options.unit == "byte" and (options.tokenize or options.lower or options.min_count > 1):
        raise UserError(
            "--unit byte takes the text as it is: leave out --tokenize, --lower and --min-count"
        )
    return LanguageModelSettings(
        corpus=options.corpus.name,
        unit=options.unit,
        language=options.tokenize,
        tokenizer=SACREMOSES if options.tokenize else NONE,
        lower=options.lower,
        min_count=options.min_count,
    )


def prepare(data: DataFolder, options) -> None:
    language_model.prepare(data, [options.corpus / f"{split}.txt" for split in SPLITS])
