#!/usr/bin/env bash
# IWSLT15 English-Vietnamese, from Stanford's files to data for scripts/train.sh iwslt15_en_vi.
set -euo pipefail

usage() {
    cat <<'END_OF_USAGE'
usage: scripts/prepare_iwslt15_envi.sh [--dest DIR] [--archive DIR] [--bpe N] [--workers N]

TED talks as Stanford's NMT group published them, tokenized: training 133,317 pairs, validation tst2012 (1,553), test
tst2013 (1,268). Downloads 38 MB and makes in --dest:
  raw/   the text without tokenization          tok/   the tokens as published, case kept
  bpe/   subwords, codes learned on both sides  bin/   fairseq's binary data, one dictionary for both languages

  --dest DIR     (default runs/data/iwslt15_en_vi)
  --archive DIR  the folder that has train, tst2012 and tst2013 (.en, .vi), if they are there already; else they are
                 downloaded to DIR/download
  --bpe N        merge operations of the joint BPE (default 10000)
  --workers N    processes (default: all cores)

In the environment: DATA_MIRROR, a folder or URL to take the files from; BPE=subword-nmt (default) or sentencepiece.
Run again, it goes on where it was. No sentence is dropped: line counts are checked after every step.
END_OF_USAGE
}

source=en
target="vi"
url=https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi
declare -A names=([train]=train [valid]=tst2012 [test]=tst2013)
declare -A pairs=([train]=133317 [valid]=1553 [test]=1268)

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"
# shellcheck source=lib/corpora.sh
source "$root/scripts/lib/corpora.sh"

dest=$root/runs/data/iwslt15_en_vi
# There is no published recipe with BPE; this is IWSLT14's number, for a corpus of the same kind and size.
operations=10000
while [[ $# -gt 0 ]]; do
    case $1 in
    --dest) option_value "$1" $#; dest=$2; shift 2 ;;
    --archive) option_value "$1" $#; given=$2; shift 2 ;;
    --bpe) option_value "$1" $#; operations=$2; shift 2 ;;
    --workers) option_value "$1" $#; workers=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
[[ -z $MOSES ]] || say "note: MOSES is not used, because the text comes tokenized"
MOSES=""
[[ -z $given || -d $given ]] || die "there is no directory '$given' (--archive)"
check_preparation
open_folder "$dest"
archives=${given:-$dest/download}

# make_text: DEST/tokens, which are the published tokens, and DEST/text, the same without tokenization.
#
# The published text is tokenized as Moses' scripts do it, which write ' as &apos; and so on. Published BLEU scores
# compare such tokens, so that they are left as they are, entities and all, which is how sacremoses has them in the other
# corpora here. sacreBLEU and chrF want plain text: the nearest thing to it is what the detokenizer of the translations
# makes of the reference.
make_text() {
    local from=$dest/unpacked text=$dest/text.partial file split lang files=() jobs=()
    for split in train valid test; do
        for lang in "$source" "$target"; do
            file=$archives/${names[$split]}.$lang
            files+=("$file" "$file")
            jobs+=("$lang" "$file" "$from/tokens/$split.$lang" "$text/$split.$lang")
        done
    done
    step check_text --allow-carriage-returns "${files[@]}"
    for split in train valid test; do
        compare_count "${names[$split]}" "$(lines "$archives/${names[$split]}.$source")" "${pairs[$split]}"
    done
    rm -rf "$from" "$text"
    make_folder "$from/tokens"
    make_folder "$text"
    say "detokenizing"
    step read_tokenized --workers "$workers" "${jobs[@]}"
    for split in train valid test; do
        for lang in "$source" "$target"; do
            same_lines "$archives/${names[$split]}.$lang" "$from/tokens/$split.$lang" "$text/$split.$lang"
        done
    done
    write_text "$from/tokens/archives" "$fetched"
    take_text "$dest" "$source" "$target"
    # With its list of archives, tokens/ comes last and says that all is there.
    rm -rf "$dest/tokens"
    mv "$from/tokens" "$dest/tokens"
}

urls=()
for split in train valid test; do urls+=("$url/${names[$split]}.$source" "$url/${names[$split]}.$target"); done
fetch_all "$archives" "$dest/tokens/archives" "${urls[@]}"
is_of "$dest/tokens/archives" || make_text
keep_settings "$dest/settings" "$(settings_of "$dest/text" "$source" "$target")"
make_folder "$dest/tok"
for split in train valid test; do
    for lang in "$source" "$target"; do
        make_file "$dest/tok/$split.$lang" cat "$dest/tokens/$split.$lang"
    done
done
prepare_corpus "$dest" "$source" "$target" "$dest/text"
