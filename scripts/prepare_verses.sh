#!/usr/bin/env bash
# The corpus that is in the repository, prepared for scripts/train.sh verses_es_en.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_verses.sh [--dest DIR] [--bpe N] [--keep-case] [--workers N]

Checks data/verses.es-en against its checksums and prepares it (Spanish to English, lower-cased, joint BPE 4,000)
in --dest.

  --dest DIR   where the data goes (default runs/data/verses_es_en)
  --bpe N      merge operations of the joint BPE (default 4000)
  --keep-case  do not lower-case
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

dest=$root/runs/data/verses_es_en source=es target=en bpe=4000 keep_case=0
parse_options "$@"
settings=("source=$source" "target=$target" "lower=$((1 - keep_case))" "bpe=$bpe")
check_verses
prepare_folder "$verses"
