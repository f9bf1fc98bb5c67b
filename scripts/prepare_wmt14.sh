#!/usr/bin/env bash
# WMT14 English-German, from the archives of statmt.org to data for scripts/train.sh wmt14_en_de_big.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/prepare_wmt14.sh [--dest DIR] [--archive DIR] [--bpe N] [--clean-stage tok|bpe] [--workers N]

Downloads Europarl v7, Common Crawl and News Commentary v12 (training), newstest2013 (validation) and newstest2014, full
(test): 1.7 GB. Makes of them what scripts/train.sh wmt14_en_de_big takes: punctuation normalised and unprintable
characters removed (in the test set only the apostrophes made plain), tokenized with hyphens split off, case kept, pairs
with a side of less than 1 or more than 250 tokens, a ratio above 1.5 or a token of more than 1000 characters removed
from the training text, joint BPE, one dictionary.

Expected: about 4.6 million training pairs before cleaning (Europarl 1,920,209, Common Crawl 2,399,123, the rest News
Commentary), 3,000 validation, 3,003 test. DIR/text has all pairs, DIR/raw those that are kept, before tokenization,
DIR/counts their numbers, and DIR/removed.tsv says which were removed and why. DIR/download may be removed at the end.

  --dest DIR           (default runs/data/wmt14_en_de_big); needs about 15 GB
  --archive DIR        the folder that has the archives, if they are there already; else they are downloaded to
                       DIR/download
  --bpe N              merge operations of the joint BPE (default 32764)
  --clean-stage STAGE  tok (default): clean by numbers of tokens, then learn BPE on the pairs that are kept;
                       bpe: learn BPE on all pairs, then clean by numbers of subwords
END
}

# shellcheck source=lib/prepare.sh
source "$(dirname "$(readlink -f "$0")")/lib/prepare.sh"

# The addresses and the names of the members are those of fairseq's examples/translation/prepare-wmt14en2de.sh.
europarl=http://statmt.org/wmt13/training-parallel-europarl-v7.tgz
crawl=http://statmt.org/wmt13/training-parallel-commoncrawl.tgz
news=http://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz
dev=http://data.statmt.org/wmt17/translation-task/dev.tgz
tests=http://statmt.org/wmt14/test-full.tgz

# 32,764 merges and newstest2013 are fairseq's settings for Ott et al. 2018, which the paper follows (its appendix names
# a vocabulary of 37K, after Vaswani et al. 2017).
dest=$root/runs/data/wmt14_en_de_big archive="" bpe=32764 clean_stage=tok
parse_options "$@"
[[ -z $archive || -d $archive ]] || die "there is no directory '$archive' (--archive)"
settings=(
    source=en target=de
    straighten=test                # in the test set ’ becomes ' before tokenization
    normalize=1 nonprinting=1      # punctuation normalised, unprintable characters made blanks, but not in the test set
    aggressive=1 compound_split=1  # hyphens within words become tokens @-@
    # fairseq's recipe has these numbers, and counts subwords; its variant for Ott et al. 2018 counts tokens (1 to 80, any
    # ratio).
    clean="1 250 1.5" clean_stage="$clean_stage"
    bpe="$bpe"
)
check_settings
open_dest

# published SPLIT READER URL PAIRS MEMBER...: the pairs of these files, by their path in the archive, for SPLIT.
published() {
    local archive=${3##*/} members=("${@:5}")
    data unpack "$archives/$archive" "${members[@]}"
    data take "$2" "text.partial/$1".{en,de} "${members[@]/#/unpacked/$archive/}" ${4:+--expect "$4"}
}

# 1. The published text, one sentence a line: DEST/text.
archives=$(absolute "${archive:-$dest/download}")
packed=()
for url in $europarl $crawl $news $dev $tests; do packed+=("$archives/${url##*/}"); done
if ! made_of "${packed[@]}"; then
    for url in $europarl $crawl $news $dev; do get "$archives" "$url"; done
    # As in sacrebleu, which has the same archive; no checksum is published for the others.
    get "$archives" $tests --md5 a8cd784e006feb32ac6f3d9ec7eb389a
    say "extracting the text"
    published train without-carriage-returns $europarl 1920209 training/europarl-v7.de-en.{en,de}
    published train without-carriage-returns $crawl 2399123 commoncrawl.de-en.{en,de}
    published train without-carriage-returns $news "" training/news-commentary-v12.de-en.{en,de}
    published valid without-carriage-returns $dev 3000 dev/newstest2013.{en,de}
    # -src.en and -ref.de are the direction from English; the archive has the other one, too, of the same sentences.
    published test sgml-segments $tests 3003 test-full/newstest2014-deen-{src.en,ref.de}.sgm
fi
keep_text text --made-of "${packed[@]}"

# 2. Tokens. fairseq's recipe normalises nothing in the test set.
say "tokenizing with ${MOSES:-sacremoses}"
data tokenize text stages/tok train valid
data tokenize text stages/tok test --without normalize nonprinting

# 3. The pairs that are kept, and subwords: DEST/raw, DEST/tok, DEST/bpe.
if [[ $clean_stage == tok ]]; then
    data select raw=text tok=stages/tok
    segment
else
    say "learning $bpe BPE operations on both languages with $BPE, and applying them"
    data learn-bpe stages/tok stages/bpe
    data apply-bpe stages/tok stages/bpe
    data select raw=text tok=stages/tok bpe=stages/bpe
fi

# 4. Binary data: DEST/bin.
binarize
