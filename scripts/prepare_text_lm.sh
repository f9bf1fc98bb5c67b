#!/usr/bin/env bash
# A language model's data from three files of text of your own.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_text_lm.sh --corpus DIR --dest DIR [--tokenize LANG] [--lower] [--min-count N] [--workers N]

Takes train.txt, valid.txt and test.txt from --corpus (one sentence or paragraph a line, UTF-8, plain or .gz), and makes
in --dest:
  raw/  the text as it came       tok/  words with one blank between them
  bin/  fairseq's binary data     settings, counts (a token is a word or the end of a line)

  --corpus DIR     the folder with the text
  --dest DIR       where the data goes
  --tokenize LANG  split punctuation from words as Moses does for this language (default: the text has tokens)
  --lower          lower-case
  --min-count N    words that are rarer in train become <unk> (default 1)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

corpus="" dest="" tokenize="" lower=0 min_count=1
parse_options "$@"
for name in corpus dest; do
    [[ -n ${!name} ]] || die "--$name is needed (see --help)"
done
check_whole --min-count "$min_count"
need_text "$corpus" {train,valid,test}.txt
options=(--tokenize "$tokenize" --min-count "$min_count")
[[ $lower -eq 0 ]] || options+=(--lower)
check_tools
open_dest
data lm-text "$(basename "$corpus")" "$(absolute "$corpus")"/{train,valid,test}.txt "${options[@]}"
