#!/usr/bin/env bash
# Multi30k German-English, from a local folder to data for scripts/train.sh multi30k_de_en.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_multi30k.sh --corpus DIR [--test NAME] [--dest DIR] [--bpe N] [--workers N]

Takes train, valid and a test set of Multi30k in both languages from --corpus (train.de, train.en, valid.de, valid.en,
test2016.de, test2016.en, one sentence a line, UTF-8, plain or .gz). Its makers ask that it be used for research and
education only, and it is not downloaded. Makes in --dest:
  raw/   the text as it came                    tok/   tokenized and lower-cased
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --corpus DIR   the folder with the text
  --test NAME    the test set: test2016 (default), test2017, ...
  --dest DIR     (default runs/data/multi30k_de_en, or multi30k_de_en_NAME for another test set)
  --bpe N        merge operations of the joint BPE (default 10000)
  --workers N    processes (default: all cores)

In the environment: MOSES=FOLDER, a checkout of mosesdecoder whose Perl scripts replace sacremoses; BPE=subword-nmt
(default) or sentencepiece. Expected: 29,000 training and 1,014 validation pairs, 1,000 in test2016 and in test2017.
Run again, it does what is missing. No sentence is dropped: line counts are checked after every step.
END
}

# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"

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
settings=(source=de target=en lower=1 bpe="$bpe")
check_settings
need_text "$corpus" {train,valid,"$test"}.{de,en}
open_dest

# 1. The text as it came: DEST/raw.
corpus=$(absolute "$corpus")
expect=()
[[ $test != test2016 && $test != test2017 ]] || expect=(--expect 1000)
data take as-is text.partial/train.{de,en} "$corpus"/train.{de,en} --expect 29000
data take as-is text.partial/valid.{de,en} "$corpus"/valid.{de,en} --expect 1014
data take as-is text.partial/test.{de,en} "$corpus/$test".{de,en} ${expect[@]+"${expect[@]}"}
keep_text raw

# 2. Tokens, lower-cased: DEST/tok.
say "tokenizing with ${MOSES:-sacremoses}"
data tokenize raw tok

# 3. Subwords: DEST/bpe.
say "learning $bpe BPE operations on both languages with $BPE"
data learn-bpe tok bpe
say "applying BPE"
data apply-bpe tok bpe

# 4. Binary data: DEST/bin.
say "binarizing with fairseq-preprocess"
data binarize
finish
