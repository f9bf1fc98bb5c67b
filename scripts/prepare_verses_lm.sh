#!/usr/bin/env bash
# The English side of the corpus that is in the repository, prepared for scripts/train.sh verses_lm_en.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_verses_lm.sh [--dest DIR] [--workers N]

Checks data/verses.es-en against its checksums, puts its English verses in the order of the text and splits them by
book: validation is Ezekiel, test is Daniel to Malachi, train is the other 52 books. Tokenizes as Moses does and
lower-cases; words that occur once or twice in train become <unk>.

  --dest DIR   where the data goes (default runs/data/verses_lm_en)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

dest=$root/runs/data/verses_lm_en
parse_options "$@"
check_verses
check_tools
open_dest
data lm-verses "$verses" unpacked
data lm-text verses unpacked/{train,valid,test}.txt --tokenize en --lower --min-count 3
