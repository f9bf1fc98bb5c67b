"""Print how many sentences a fairseq index file (.idx) holds.

Reads the header of the memory-mapped format alone: magic (9 bytes), version (uint64), dtype code (uint8), count
(uint64). Importing fairseq to ask the same would take seconds.
"""

import struct
import sys
from pathlib import Path

HEADER = struct.Struct("<9sQBQ")

path = Path(sys.argv[1])
try:
    with path.open("rb") as file:
        magic, _, _, count = HEADER.unpack(file.read(HEADER.size))
except (OSError, struct.error) as error:
    sys.exit(f"cannot read {path}: {error}")
if magic != b"MMIDIDX\x00\x00":
    sys.exit(f"{path} is not an index of fairseq's memory-mapped format")
print(count)
