#!/usr/bin/env bash
# IWSLT14 German-English as in fairseq's examples/translation/prepare-iwslt14.sh, whose data the paper used.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_iwslt14.sh [--dest DIR] [options]

Downloads IWSLT14 German-English, and makes of it what scripts/train.sh iwslt14_de_en takes:
  1. tags are stripped; test is dev2010, TEDX dev2012, tst2010, tst2011 and tst2012
  2. the text is tokenized and lower-cased
  3. training pairs are removed if a side has less than 1 or more than 175 tokens, the ratio of lengths is above 1.5, or
     a token has more than 1000 characters
  4. every 23rd training pair that is kept is for validation
  5. joint BPE is learned and applied, and the text is binarized with one dictionary
160239 train, 7283 valid and 6750 test pairs are expected. DIR/text has all pairs, DIR/raw those that are kept, before
tokenization, DIR/counts their numbers, and DIR/removed.tsv says which were removed and why.

  --dest DIR      where it goes (default runs/data/iwslt14_de_en)
  --archive FILE  the archive de-en.tgz, if it is there already; else it is downloaded to DIR/download
  --sha256 HEX    the checksum that a downloaded archive must have
  --bpe N         merge operations of the joint BPE (default 10000)
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

url=https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz
dest=$root/runs/data/iwslt14_de_en archive="" sha256="" bpe=10000
parse_options "$@"
[[ -z $archive || -f $archive ]] || die "there is no archive '$archive' (--archive)"
[[ -z $archive || -z $sha256 ]] || die "--sha256 is for a download; --archive takes a file as it is"
settings=(
    source=de target=en
    straighten=test    # in the test set ’ becomes ' before tokenization
    lower=1            # lower-cased after tokenization
    clean="1 175 1.5"  # training pairs are removed with a side of less than 1 or more than 175 tokens, or a ratio above 1.5
    valid_every=23     # every 23rd training pair that is kept is for validation
    bpe="$bpe"
)
check_settings
open_dest

# 1. The published text, one sentence a line: DEST/text.
archive=$(absolute "${archive:-$dest/download/${url##*/}}")
if ! made_of "$archive"; then
    [[ $archive != "$dest/download/"* ]] || data fetch "$url" "$archive" ${sha256:+--sha256 "$sha256"}
    say "extracting the text of $archive"
    # Their order is that of the test set.
    tests=(de-en/IWSLT14.{TED.dev2010,TEDX.dev2012,TED.tst2010,TED.tst2011,TED.tst2012}.de-en.{de,en}.xml)
    files=unpacked/$(basename "$archive")
    data unpack "$archive" de-en/train.tags.de-en.{de,en} "${tests[@]}"
    data take strip-tags text.partial/train.{de,en} "$files"/de-en/train.tags.de-en.{de,en}
    data take xml-segments text.partial/test.{de,en} "${tests[@]/#/$files/}"
fi
keep_text text --made-of "$archive"

# 2. Tokens, lower-cased.
say "tokenizing with ${MOSES:-sacremoses}"
data tokenize text stages/tok

# 3. The pairs that are kept, and the validation set: DEST/raw, DEST/tok.
say "selecting pairs"
data select raw=text tok=stages/tok

# 4. Joint BPE, learned on what is kept: DEST/bpe. Binary data: DEST/bin.
segment
binarize
[[ "$(count train) $(count valid) $(count test)" == "160239 7283 6750" ]] ||
    say "the numbers of pairs differ from 160239 train, 7283 valid, 6750 test (original archive, Moses' tokenizer)"
