"""Whether a file is what its name says, by its first bytes."""

HEAD = 512
"""How many of a file's first bytes :func:`wrong_type` wants to see."""

_MAGIC = {
    (".gz", ".tgz"): ("a gzip archive", b"\x1f\x8b"),
    (".bz2", ".tbz"): ("a bzip2 archive", b"BZh"),
    (".xz", ".txz"): ("an xz archive", b"\xfd7zXZ\x00"),
    (".zip",): ("a zip archive", b"PK"),
}


def wrong_type(head: bytes, name: str) -> str | None:
    """What the bytes are instead of what the file's name promises; None if nothing speaks against it.

    Servers answer for a file that is gone, and hotels for every file, with a web page and the status of success.
    """
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page"
    for suffixes, (kind, magic) in _MAGIC.items():
        if name.lower().endswith(suffixes) and not head.startswith(magic):
            return f"not {kind} (it begins with {head[:12]!r})" if head else "an empty file"
    return None
