"""IWSLT14 German-English as in fairseq's examples/translation/prepare-iwslt14.sh, whose data the
paper used.

Downloads IWSLT14 German-English and makes the data for `pn train iwslt14_de_en`:
  1. tags are stripped; test is dev2010, TEDX dev2012, tst2010, tst2011 and tst2012
  2. the text is tokenized and lower-cased
  3. training pairs are removed if a side has fewer than 1 or more than 175 tokens, the ratio of
     lengths is above 1.5, or a token has more than 1000 characters
  4. every 23rd remaining training pair becomes validation
  5. joint BPE is learned and applied, and the text is binarized with one dictionary
160239 train, 7283 valid and 6750 test pairs are expected (original archive, Moses' tokenizer).
"""

from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import ARCHIVE, DataFolder, Settings, bpe
from pn_fairseq.pipeline.data.pairs import segments, strip_tags

CONFIG = "iwslt14_de_en"
REPRODUCE = Experiment(CONFIG, "iwslt")
OPTIONS = ARCHIVE | bpe(10000)

URL = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
TRAIN = [f"de-en/train.tags.de-en.{lang}" for lang in ("de", "en")]
# In the order of the test set.
SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TESTS = [f"de-en/IWSLT14.{name}.de-en.{lang}.xml" for name in SETS for lang in ("de", "en")]


def settings(options) -> Settings:
    return Settings(
        source="de",
        target="en",
        straighten=("test",),  # in the test set ’ becomes ' before tokenization
        lower=True,  # lower-cased after tokenization
        # remove training pairs with a side of fewer than 1 or more than 175 tokens, or a ratio
        # above 1.5
        clean=(1, 175, 1.5),
        valid_every=23,  # every 23rd training pair that is kept is for validation
        bpe=options.bpe,
    )


def prepare(data: DataFolder, options) -> None:
    # 1. The published text, one sentence per line: DEST/text.
    files = data.published({URL: ""})
    if files:
        members = data.unpack(*files, [*TRAIN, *TESTS])
        data.take(strip_tags, "train", members[:2])
        data.take(segments, "test", members[2:])
    if not data.begin("text"):
        return

    # 2. Tokens, lower-cased.
    data.tokenize("text", "stages/tok")

    # 3. The pairs that are kept, and the validation set: DEST/raw, DEST/tok.
    data.select()

    # 4. Joint BPE, learned on what is kept: DEST/bpe. Binary data: DEST/bin.
    data.segment()
    data.binarize(
        "160,239 train, 7,283 valid, 6,750 test, from the original archive with Moses' tokenizer"
    )
