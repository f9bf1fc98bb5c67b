"""The file of ``--norm-probe``: a folder of Parquet files, one for every recorded update.

``pandas.read_parquet(FILE)`` and every other Parquet reader reads the folder as one table. A file
is written as a whole and named after its update, so that a run that is killed and resumed records
every update once.
"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pn_fairseq.common.files import atomic_write

#: Vectors over channels for which the table contains (1/d) * L1 and (1/d) * L2.
VECTORS = (
    "mu_distance",
    "sigma2_distance",
    "psi2_distance",
    "g_mu",
    "g_sigma2",
    "g_psi2",
    "nu_xhat",
)

_DOUBLES = [
    f"{name}_{norm}"
    for name in VECTORS
    for norm in ("l1", "l2")
    if (name, norm) != ("nu_xhat", "l1")
]

#: The columns; :class:`pn_fairseq.models.norm_probe.NormProbe` describes them.
SCHEMA = pa.schema(
    [
        ("update", pa.int64()),
        ("forward", pa.int64()),
        ("norm", pa.string()),
        ("kind", pa.string()),
        ("running", pa.string()),
        ("channels", pa.int64()),
        ("tokens", pa.float64()),
        ("sample_size", pa.float64()),
        ("loss", pa.float64()),
        ("loss_scale", pa.float64()),
        *((name, pa.float64()) for name in _DOUBLES),
        ("tid_mean", pa.float64()),
        ("tid_var", pa.float64()),
        ("gamma_over_psi_batch", pa.list_(pa.float32())),
        ("psi_batch_over_psi", pa.list_(pa.float32())),
    ]
)

_NAME = "update-{:09d}.parquet"
_PATTERN = re.compile(r"update-(\d{9})\.parquet")
#: The key in a file's metadata for the run that wrote it.
_TRAINING = b"training"


def open_probe(folder: Path, update: int, training: str) -> None:
    """Create the folder, or remove what was recorded after ``update``, because a run that resumes
    there records it again.

    Args:
        training: identifies the run, which replaces only its own file when it starts again.

    Raises:
        ValueError: ``folder`` is neither a new file of ``--norm-probe`` nor one of this run.
        OSError: the folder cannot be created.
    """
    advice = "give a new folder, or that of the same training"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--norm-probe {folder} is not a folder: {advice}")
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.iterdir())
    updates = [_PATTERN.fullmatch(path.name.removesuffix(".partial")) for path in files]
    if None in updates:
        raise ValueError(f"--norm-probe {folder} holds {files[updates.index(None)].name}: {advice}")
    whole = [path for path in files if path.suffix == ".parquet"]
    owner = _training(whole[0]) if whole else training
    if update == 0 and owner != training:
        raise ValueError(
            f"--norm-probe {folder} holds {len(whole)} updates of the run in {owner}: {advice}"
        )
    for path, number in zip(files, updates, strict=True):
        if int(number[1]) > update:
            path.unlink()


def _training(file: Path) -> str:
    try:
        return (pq.read_schema(file).metadata or {}).get(_TRAINING, b"another folder").decode()
    except pa.ArrowException:
        return "another folder"


def write_update(folder: Path, update: int, rows: list[dict], training: str) -> None:
    """Write the rows of one update, by column name; a column that a row lacks is null."""
    table = pa.Table.from_pylist(rows, SCHEMA).replace_schema_metadata({_TRAINING: training})
    with atomic_write(folder / _NAME.format(update)) as file:
        pq.write_table(table, file, compression="zstd")
