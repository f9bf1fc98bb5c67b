#!/usr/bin/env bash
# The corpus that lies in the repository, prepared for scripts/train.sh verses_es_en.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_verses.sh [--dest DIR] [options of prepare_text.sh]

Checks data/verses.es-en against its checksums and prepares it (Spanish to English, lower-cased, joint BPE 4,000)
in --dest (default runs/data/verses_es_en). Run again, it does what is missing.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"

corpus=$root/data/verses.es-en
for argument; do
    case $argument in
    -h | --help) usage; exit 0 ;;
    esac
done
(cd "$corpus" && sha256sum --check --status SHA256SUMS) ||
    die "$corpus is damaged or incomplete; 'git checkout -- data' brings it back"
exec bash "$root/scripts/prepare_text.sh" --corpus "$corpus" --source es --target en --bpe 4000 \
    --dest "$root/runs/data/verses_es_en" "$@"
