#!/usr/bin/env bash
# WMT14 English-German, from the archives of statmt.org to data for scripts/train.sh wmt14_en_de_big.
set -euo pipefail

usage() {
    cat <<'END_OF_USAGE'
usage: scripts/prepare_wmt14.sh [--dest DIR] [--archive DIR] [--bpe N] [--clean-stage tok|bpe] [--workers N]

Downloads Europarl v7, Common Crawl and News Commentary v12 (training), newstest2013 (validation) and newstest2014, full
(test): 1.7 GB. Makes of them what scripts/train.sh wmt14_en_de_big takes: punctuation normalised and unprintable
characters removed (in the test set only the apostrophes made plain), tokenized with hyphens split off, case kept, pairs
with a side of less than 1 or more than 250 tokens or a ratio above 1.5 removed from the training text, joint BPE, one
dictionary.

  --dest DIR          (default runs/data/wmt14_en_de_big); needs about 15 GB
  --archive DIR       the folder that has the archives, if they are there already; else they are downloaded to
                      DIR/download
  --bpe N             merge operations of the joint BPE (default 32764)
  --clean-stage tok   the 250 and the 1.5 count tokens, and BPE is learned on what is kept (default)
  --clean-stage bpe   they count subwords, and BPE is learned on everything
  --workers N         processes (default: all cores)

In the environment: DATA_MIRROR, a folder or URL to take the archives from; MOSES=FOLDER, a checkout of mosesdecoder
whose Perl scripts replace sacremoses; BPE=subword-nmt (default) or sentencepiece.

Expected: about 4.6 million training pairs before cleaning (Europarl 1,920,209, Common Crawl 2,399,123, the rest News
Commentary), 3,000 validation, 3,003 test. Run again, it does what is missing. DIR/raw has the text as it was published,
DIR/counts the numbers of pairs, and DIR/removed.tsv says which pairs were removed and why; DIR/download may be removed
at the end.
END_OF_USAGE
}

source=en
target=de
# The addresses and the names of the members are those of fairseq's examples/translation/prepare-wmt14en2de.sh.
urls=(
    http://statmt.org/wmt13/training-parallel-europarl-v7.tgz
    http://statmt.org/wmt13/training-parallel-commoncrawl.tgz
    http://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz
    http://data.statmt.org/wmt17/translation-task/dev.tgz
    http://statmt.org/wmt14/test-full.tgz
)
# The first three in the order of urls; then the pairs they are known to have (0: not known).
training=(training/europarl-v7.de-en commoncrawl.de-en training/news-commentary-v12.de-en)
training_pairs=(1920209 2399123 0)
valid=dev/newstest2013
valid_pairs=3000
# -src.en and -ref.de are the direction from English; the archive has the other one, too, of the same sentences.
test_set="test-full/newstest2014-deen"
test_pairs=3003

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"
# shellcheck source=lib/corpora.sh
source "$root/scripts/lib/corpora.sh"

# As in sacrebleu, which has the same archive; none is published for the others.
md5[test-full.tgz]=a8cd784e006feb32ac6f3d9ec7eb389a

dest=$root/runs/data/wmt14_en_de_big
# 32,764 merges and newstest2013 are fairseq's settings for Ott et al. 2018, which the paper follows (its appendix names
# a vocabulary of 37K, after Vaswani et al. 2017).
operations=32764
normalize=1
nonprinting=1
aggressive=1
straighten="test"
compound_split=1
# fairseq's recipe has these numbers, and counts subwords; its variant for Ott et al. 2018 counts tokens (1 to 80, any
# ratio).
clean="1 250 1.5"
while [[ $# -gt 0 ]]; do
    case $1 in
    --dest) option_value "$1" $#; dest=$2; shift 2 ;;
    --archive) option_value "$1" $#; given=$2; shift 2 ;;
    --bpe) option_value "$1" $#; operations=$2; shift 2 ;;
    --clean-stage) option_value "$1" $#; clean_stage=$2; shift 2 ;;
    --workers) option_value "$1" $#; workers=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
[[ $clean_stage == tok || $clean_stage == bpe ]] || die "--clean-stage must be tok or bpe, not '$clean_stage'"
[[ -z $given || -d $given ]] || die "there is no directory '$given' (--archive)"
check_preparation
open_folder "$dest"
archives=${given:-$dest/download}

# make_text: DEST/text from the archives.
make_text() {
    local from=$dest/unpacked text=$dest/text.partial part lang files=() count total=0
    rm -rf "$from" "$text"
    for part in 0 1 2; do
        extract "$archives/${urls[part]##*/}" "$from/$part" "${training[part]}.$source" "${training[part]}.$target"
    done
    extract "$archives/${urls[3]##*/}" "$from/valid" "$valid.$source" "$valid.$target"
    extract "$archives/${urls[4]##*/}" "$from/test" "$test_set-src.$source.sgm" "$test_set-ref.$target.sgm"
    say "checking and joining the text"
    make_folder "$text"
    # Each part by itself, so that a message names it.
    for part in 0 1 2; do
        for lang in "$source" "$target"; do
            files+=("$from/$part/${training[part]}.$lang" "${training[part]}.$lang")
        done
    done
    for lang in "$source" "$target"; do files+=("$from/valid/$valid.$lang" "$valid.$lang"); done
    step check_text --allow-carriage-returns "${files[@]}"
    for part in 0 1 2; do
        for lang in "$source" "$target"; do add_text "$from/$part/${training[part]}.$lang" "$text/train.$lang"; done
        count=$(lines "$from/$part/${training[part]}.$source")
        [[ ${training_pairs[part]} -eq 0 ]] || compare_count "${training[part]}" "$count" "${training_pairs[part]}"
        total=$((total + count))
    done
    [[ $(lines "$text/train.$source") -eq $total ]] ||
        die "$text/train.$source has $(lines "$text/train.$source") lines and its parts $total: sentences were lost"
    for lang in "$source" "$target"; do add_text "$from/valid/$valid.$lang" "$text/valid.$lang"; done
    step sgml_segments "$from/test/$test_set-src.$source.sgm" "$text/test.$source" \
        "$from/test/$test_set-ref.$target.sgm" "$text/test.$target"
    compare_count newstest2013 "$(lines "$text/valid.$source")" "$valid_pairs"
    compare_count newstest2014 "$(lines "$text/test.$source")" "$test_pairs"
    write_text "$text/archives" "$fetched"
    take_text "$dest" "$source" "$target"
    rm -rf "$from"
}

fetch_all "$archives" "$dest/text/archives" "${urls[@]}"
is_of "$dest/text/archives" || make_text
keep_settings "$dest/settings" "$(settings_of "$dest/text" "$source" "$target")"
# The test set is tokenized apart: fairseq's recipe makes its apostrophes plain, and normalises nothing else there.
[[ -f $dest/counts || -d $dest/stages/selected ]] ||
    normalize=0 nonprinting=0 tokenize_texts "$dest/text" "$dest/stages/tok" "$source" "$target" test
prepare_corpus "$dest" "$source" "$target" "$dest/text"
