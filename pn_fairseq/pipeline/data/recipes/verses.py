"""Bible verses, Spanish to English: the corpus in the repository.

Checks data/verses.es-en against its checksums and prepares it (lower-cased, joint BPE 4,000) for
`pn train verses_es_en`.
"""

from pathlib import Path

from pn_fairseq.common.command import UserError
from pn_fairseq.common.files import checksum, read_settings, shipped
from pn_fairseq.pipeline.data.experiment import Experiment
from pn_fairseq.pipeline.data.folder import KEEP_CASE, DataFolder, Settings, bpe

CONFIG = "verses_es_en"
REPRODUCE = Experiment(CONFIG, "tiny", (1, 2))
OPTIONS = bpe(4000) | KEEP_CASE


def corpus() -> Path:
    """The folder of the verses, which are part of this project."""
    folder = shipped("data/verses.es-en")
    sums = read_settings(folder / "SHA256SUMS")
    if any(not (folder / name).is_file() or checksum(folder / name) != sums[name] for name in sums):
        raise UserError(f"{folder} is damaged or incomplete; 'git checkout -- data' brings it back")
    return folder


def settings(options) -> Settings:
    return Settings(source="es", target="en", lower=not options.keep_case, bpe=options.bpe)


def prepare(data: DataFolder, options) -> None:
    data.prepare_folder(corpus())
