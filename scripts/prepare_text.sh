#!/usr/bin/env bash
# From raw parallel text to data that scripts/train.sh takes.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_text.sh --corpus DIR --source LANG --target LANG --dest DIR [options]

Takes train, valid and test in both languages from --corpus (train.es, train.en, ... one sentence a line, UTF-8, plain
or .gz), and makes in --dest:
  raw/   the text as it came                    tok/   tokenized (sacremoses) and lower-cased
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --bpe N        merge operations of the joint BPE (default 10000)
  --keep-case    do not lower-case
  --workers N    processes (default: all cores)

Run again, it does what is missing. No sentence is dropped: line counts are checked after every step.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"

corpus="" source="" target="" dest=""
operations=10000
lower=1
workers=$(nproc)
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
check_whole --bpe "$operations"
check_whole --workers "$workers"
[[ $source != "$target" ]] || die "--source and --target are both '$source'"
[[ -d $corpus ]] || die "there is no directory '$corpus' (--corpus)"
for split in train valid test; do
    for lang in "$source" "$target"; do
        [[ -f $corpus/$split.$lang || -f $corpus/$split.$lang.gz ]] || die "$corpus has neither $split.$lang nor $split.$lang.gz"
    done
done
use_venv
need python gzip sacremoses subword-nmt fairseq-preprocess sha256sum
mkdir -p "$dest" 2>/dev/null || die "cannot make the directory '$dest' (--dest)"

# The text is read anew each time, so that a corrected file is noticed and a changed one refused.
rm -rf "$dest/raw.partial"
mkdir "$dest/raw.partial"
texts=()
for split in train valid test; do
    for lang in "$source" "$target"; do
        text=$dest/raw.partial/$split.$lang
        unpack_text "$corpus/$split.$lang" >"$text" || die "$corpus/$split.$lang is damaged or cut off; get it again"
        reason=$(python "$root/scripts/lib/check_text.py" "$text" "$corpus/$split.$lang" 2>&1) || die "$reason"
        texts+=("$split.$lang")
    done
    count=$(lines "$dest/raw.partial/$split.$source")
    [[ $(lines "$dest/raw.partial/$split.$target") -eq $count ]] ||
        die "$corpus/$split.$source has $count lines and $split.$target $(lines "$dest/raw.partial/$split.$target"): they are not translations of each other"
done
keep_settings "$dest/settings" "source=$source
target=$target
lower=$lower
bpe=$operations
$(cd "$dest/raw.partial" && sha256sum "${texts[@]}")"
rm -rf "$dest/raw"
mv "$dest/raw.partial" "$dest/raw"

if [[ -d $dest/bin ]]; then
    say "$dest is complete"
    exit 0
fi
mkdir -p "$dest/tok" "$dest/bpe"
say "tokenizing with sacremoses"
for split in train valid test; do
    for lang in "$source" "$target"; do
        make_file "$dest/tok/$split.$lang" tokenize "$lang" "$workers" "$lower" "$dest/raw/$split.$lang"
        same_lines "$dest/raw/$split.$lang" "$dest/tok/$split.$lang"
    done
done
say "learning $operations BPE operations on both languages"
make_file "$dest/bpe/codes" learn_joint_bpe "$operations" "$dest/tok/train.$source" "$dest/tok/train.$target"
say "applying BPE"
for split in train valid test; do
    for lang in "$source" "$target"; do
        make_file "$dest/bpe/$split.$lang" apply_joint_bpe "$dest/bpe/codes" "$dest/tok/$split.$lang"
        same_lines "$dest/tok/$split.$lang" "$dest/bpe/$split.$lang"
    done
done
say "binarizing with fairseq-preprocess"
binarize "$dest" "$source" "$target" "$workers"
say "$dest is complete: $(lines "$dest/raw/train.$source") train, $(lines "$dest/raw/valid.$source") valid, $(lines "$dest/raw/test.$source") test"
