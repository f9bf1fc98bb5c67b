"""Bible verses, Spanish to English: the corpus that is in the repository.

Checks data/verses.es-en against its checksums and prepares it (lower-cased, joint BPE 4,000) for
`pn train verses_es_en`.
"""

from pathlib import Path

import pn_fairseq
from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import checksum, read_settings
from pn_fairseq.pipeline.data.preparation import KEEP_CASE, Preparation, bpe

CONFIG = "verses_es_en"
OPTIONS = (bpe(4000), KEEP_CASE)


def corpus() -> Path:
    """The folder of the verses, in the checkout that has this package or in the current folder."""
    checkouts = Path(pn_fairseq.__file__).resolve().parent.parent, Path.cwd()
    for folder in (checkout / "data/verses.es-en" for checkout in checkouts):
        if (folder / "SHA256SUMS").is_file():
            sums = read_settings(folder / "SHA256SUMS")
            if any(not (folder / name).is_file() or checksum(folder / name) != sums[name] for name in sums):
                raise UserError(f"{folder} is damaged or incomplete; 'git checkout -- data' brings it back")
            return folder
    raise UserError("the verses, data/verses.es-en, are in the repository only: run this in a checkout of it")


def prepare(data: Preparation, bpe: str, keep_case: bool) -> None:
    folder = corpus()
    data.begin(CONFIG, source="es", target="en", lower=int(not keep_case), bpe=bpe)
    data.take_folder(folder)
    data.tokenize("raw", "tok")
    data.segment()
    data.binarize()
