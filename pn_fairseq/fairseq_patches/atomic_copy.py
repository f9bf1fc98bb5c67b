"""A kill or a full disk while fairseq copies a checkpoint leaves no damaged ``checkpoint_last.pt``.

fairseq writes the first file of a save under another name and renames it, but copies it in place to
``checkpoint_best.pt`` and ``checkpoint_last.pt``. A training whose copy was cut off cannot be resumed. Here a copy is
also written under another name and then renamed.
"""

from fairseq.file_io import PathManager

from pn_fairseq.fairseq_patches import patch


@patch(PathManager, "copy", "src_path dst_path overwrite")
def copy(original, src_path, dst_path, overwrite=False):
    if not overwrite or not PathManager.supports_rename(dst_path):
        return original(src_path, dst_path, overwrite=overwrite)
    partial = f"{dst_path}.tmp"
    try:
        copied = original(src_path, partial, overwrite=True)
    except Exception:
        if PathManager.exists(partial):
            PathManager.rm(partial)
        raise
    PathManager.rename(partial, dst_path)
    return copied
