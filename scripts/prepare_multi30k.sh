#!/usr/bin/env bash
# Multi30k German-English, from a local folder to data for scripts/train.sh multi30k_de_en.
set -euo pipefail

usage() {
    cat <<'END_OF_USAGE'
usage: scripts/prepare_multi30k.sh --corpus DIR [--test NAME] [--dest DIR] [--bpe N] [--workers N]

Takes train, valid and a test set of Multi30k in both languages from --corpus (train.de, train.en, valid.de, valid.en,
test2016.de, test2016.en, one sentence a line, UTF-8, plain or .gz). Its makers ask that it be used for research and
education only, and it is not downloaded. Makes in --dest:
  raw/   the text as it came                    tok/   tokenized and lower-cased
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --test NAME    the test set: test2016 (default), test2017, ...
  --dest DIR     (default runs/data/multi30k_de_en, or multi30k_de_en_NAME for another test set)
  --bpe N        merge operations of the joint BPE (default 10000)
  --workers N    processes (default: all cores)

In the environment: MOSES=FOLDER, a checkout of mosesdecoder whose Perl scripts replace sacremoses; BPE=subword-nmt
(default) or sentencepiece. Expected: 29,000 training and 1,014 validation pairs, 1,000 in test2016 and in test2017.
Run again, it does what is missing. No sentence is dropped: line counts are checked after every step.
END_OF_USAGE
}

declare -A pairs=([train]=29000 [valid]=1014 [test2016]=1000 [test2017]=1000)

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"
# shellcheck source=lib/corpora.sh
source "$root/scripts/lib/corpora.sh"

corpus="" dest="" test=test2016
# The scripts of the corpus' repository (multi30k/dataset) lower-case, too, and leave the number of merges to their
# user; this is IWSLT14's.
operations=10000
lower=1
while [[ $# -gt 0 ]]; do
    case $1 in
    --corpus) option_value "$1" $#; corpus=$2; shift 2 ;;
    --test) option_value "$1" $#; test=$2; shift 2 ;;
    --dest) option_value "$1" $#; dest=$2; shift 2 ;;
    --bpe) option_value "$1" $#; operations=$2; shift 2 ;;
    --workers) option_value "$1" $#; workers=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
[[ -n $corpus ]] || die "--corpus is needed (see --help)"
[[ -d $corpus ]] || die "there is no directory '$corpus' (--corpus)"
[[ -n $test && $test != */* ]] || die "--test must be the name of a test set in $corpus, such as test2016, not '$test'"
if [[ -z $dest ]]; then
    dest=$root/runs/data/multi30k_de_en
    [[ $test == test2016 ]] || dest+=_$test
fi
check_preparation
need_files "$corpus" de en "$test"
open_folder "$dest"
text=$dest/text.partial
copy_files "$text" "$corpus" de en "$test"
declare -A names=([train]=train [valid]=valid [test]=$test)
for split in train valid test; do
    known=${pairs[${names[$split]}]:-}
    [[ -z $known ]] || compare_count "${names[$split]}" "$(lines "$text/$split.de")" "$known"
done
prepare_corpus "$dest" de en "$text"
