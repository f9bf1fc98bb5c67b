#!/usr/bin/env bash
# From raw parallel text to data that scripts/train.sh takes.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_text.sh --corpus DIR --source LANG --target LANG --dest DIR [options]

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), and makes in --dest:
  raw/   the text as it came                    tok/   tokenized and lower-cased
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --bpe N        merge operations of the joint BPE (default 10000)
  --keep-case    do not lower-case
  --workers N    processes (default: all cores)

In the environment: MOSES=FOLDER, a checkout of mosesdecoder whose Perl scripts replace sacremoses; BPE=subword-nmt
(default) or sentencepiece.
Run again, it does what is missing. No sentence is dropped: line counts are checked after every step.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"

corpus="" source="" target="" dest=""
lower=1
while [[ $# -gt 0 ]]; do
    case $1 in
    --corpus) option_value "$1" $#; corpus=$2; shift 2 ;;
    --source) option_value "$1" $#; source=$2; shift 2 ;;
    --target) option_value "$1" $#; target=$2; shift 2 ;;
    --dest) option_value "$1" $#; dest=$2; shift 2 ;;
    --bpe) option_value "$1" $#; operations=$2; shift 2 ;;
    --workers) option_value "$1" $#; workers=$2; shift 2 ;;
    --keep-case) lower=0; shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
for name in corpus source target dest; do
    [[ -n ${!name} ]] || die "--$name is needed (see --help)"
done
check_preparation
[[ $source != "$target" ]] || die "--source and --target are both '$source'"
[[ -d $corpus ]] || die "there is no directory '$corpus' (--corpus)"
need_files "$corpus" "$source" "$target" test
open_folder "$dest"
copy_files "$dest/text.partial" "$corpus" "$source" "$target" test
prepare_corpus "$dest" "$source" "$target" "$dest/text.partial"
