#!/usr/bin/env bash
# Multi30k German-English, from a local folder to data for scripts/train.sh multi30k_de_en.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_multi30k.sh --corpus DIR [--test NAME] [--dest DIR] [--bpe N] [--workers N]

Takes train, valid and a test set of Multi30k in both languages from --corpus (train.de, train.en, valid.de, valid.en,
test2016.de, test2016.en, one sentence a line, UTF-8, plain or .gz). Its makers ask that it be used for research and
education only, and it is not downloaded. Expected: 29,000 training and 1,014 validation pairs, 1,000 in test2016 and in
test2017. Makes in --dest:
  raw/   the text as it came                    tok/   tokenized and lower-cased
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --corpus DIR   the folder with the text
  --test NAME    the test set: test2016 (default), test2017, ...
  --dest DIR     (default runs/data/multi30k_de_en, or multi30k_de_en_NAME for another test set)
  --bpe N        merge operations of the joint BPE (default 10000)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

# The scripts of the corpus' repository (multi30k/dataset) lower-case, too, and leave the number of merges to their
# user; this is IWSLT14's.
corpus="" dest="" test=test2016 bpe=10000
parse_options "$@"
[[ -n $corpus ]] || die "--corpus is needed (see --help)"
[[ -n $test && $test != */* ]] || die "--test must be the name of a test set in $corpus, such as test2016, not '$test'"
if [[ -z $dest ]]; then
    dest=$root/runs/data/multi30k_de_en
    [[ $test == test2016 ]] || dest+=_$test
fi
source=de target=en
settings=("source=$source" "target=$target" lower=1 "bpe=$bpe")
pairs=(29000 1014)
[[ $test != test2016 && $test != test2017 ]] || pairs+=(1000)
prepare_folder "$corpus" "$test" "${pairs[@]}"
