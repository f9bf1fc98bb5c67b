#!/usr/bin/env bash
# From raw parallel text to data that scripts/train.sh takes.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_text.sh --corpus DIR --source LANG --target LANG --dest DIR [options]

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), and makes in --dest:
  raw/   the text as it came                    tok/   tokenized, and lower-cased unless --keep-case
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --corpus DIR   the folder with the text
  --source LANG  the language to translate from, as in the names of the files
  --target LANG  the language to translate to
  --dest DIR     where the data goes
  --bpe N        merge operations of the joint BPE (default 10000)
  --keep-case    do not lower-case
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

corpus="" source="" target="" dest="" bpe=10000 keep_case=0
parse_options "$@"
for name in corpus source target dest; do
    [[ -n ${!name} ]] || die "--$name is needed (see --help)"
done
settings=("source=$source" "target=$target" "lower=$((1 - keep_case))" "bpe=$bpe")
prepare_folder "$corpus"
