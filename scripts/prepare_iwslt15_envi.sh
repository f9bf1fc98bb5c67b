#!/usr/bin/env bash
# IWSLT15 English-Vietnamese, from Stanford's files to data for scripts/train.sh iwslt15_en_vi.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_iwslt15_envi.sh [--dest DIR] [--archive DIR] [--bpe N] [--workers N]

TED talks as Stanford's NMT group published them, tokenized: training 133,317 pairs, validation tst2012 (1,553), test
tst2013 (1,268). Downloads 38 MB and makes in --dest:
  raw/   the text without tokenization          tok/   the tokens as published, case kept
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --dest DIR     (default runs/data/iwslt15_en_vi)
  --archive DIR  the folder that has train, tst2012 and tst2013 (.en, .vi), if they are there already; else they are
                 downloaded to DIR/download
  --bpe N        merge operations of the joint BPE (default 10000)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

url=https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi
names=({train,tst2012,tst2013}.{en,vi})

# There is no published recipe with BPE; 10,000 is IWSLT14's number, for a corpus of the same kind and size.
dest=$root/runs/data/iwslt15_en_vi archive="" bpe=10000
parse_options "$@"
[[ -z $archive || -d $archive ]] || die "there is no directory '$archive' (--archive)"
[[ -z $MOSES ]] || say "note: MOSES is not used, because the text comes tokenized"
MOSES=""
settings=(
    source=en target=vi
    tokenizer=sacremoses # of the published text; nothing is tokenized here
    bpe="$bpe"
)
check_settings
open_dest

# 1. The published tokens, as they are (DEST/text/tokens): they were tokenized as Moses' scripts do it, with ' as &apos;
# and so on, and published BLEU scores compare such tokens. sacreBLEU and chrF want plain text (DEST/text): the nearest
# thing to it is what the detokenizer of the translations makes of the reference.
archives=$(absolute "${archive:-$dest/download}")
if ! made_of "${names[@]/#/$archives/}"; then
    for name in "${names[@]}"; do get "$archives" "$url/$name"; done
    data take tokens text.partial/tokens/train.{en,vi} "$archives"/train.{en,vi} --expect 133317
    data take tokens text.partial/tokens/valid.{en,vi} "$archives"/tst2012.{en,vi} --expect 1553
    data take tokens text.partial/tokens/test.{en,vi} "$archives"/tst2013.{en,vi} --expect 1268
    say "detokenizing"
    data detokenize text.partial/tokens text.partial
fi
keep_text text --made-of "${names[@]/#/$archives/}"
data copy text raw
data copy text/tokens tok

# 2. Subwords and binary data: DEST/bpe, DEST/bin.
segment
binarize
