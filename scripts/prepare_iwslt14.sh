#!/usr/bin/env bash
# IWSLT14 German-English as in fairseq's examples/translation/prepare-iwslt14.sh, which the paper's figures go back to.
set -euo pipefail

url=http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz
source=de
target=en
corpus=$source-$target
# In the order in which they make up the test set.
test_sets=(TED.dev2010 TEDX.dev2012 TED.tst2010 TED.tst2011 TED.tst2012)
# What comes of the original archive with Moses' own tokenizer.
expected_train=160239
expected_valid=7283
expected_test=6750

usage() {
    cat <<END_OF_USAGE
usage: scripts/prepare_iwslt14.sh [--dest DIR] [options]

Downloads IWSLT14 German-English, and makes of it what scripts/train.sh iwslt14_de_en takes: tags stripped, tokenized,
pairs with a side of less than 1 or more than 175 tokens or a ratio above 1.5 removed from the training text,
lower-cased, every 23rd training pair for validation, dev2010, TEDX dev2012, tst2010, tst2011 and tst2012 for test, joint
BPE, one dictionary. $expected_train train, $expected_valid valid and $expected_test test pairs are expected.

  --dest DIR      where it goes (default runs/data/iwslt14_de_en)
  --archive FILE  the archive de-en.tgz, if it is there already; else it is downloaded to DIR/download
  --sha256 HEX    the checksum that a downloaded archive must have
  --bpe N         merge operations of the joint BPE (default 10000)
  --workers N     processes (default: all cores)

Environment: MOSES=FOLDER uses the Perl scripts of that checkout of mosesdecoder instead of sacremoses; BPE=sentencepiece
instead of subword-nmt; DATA_MIRROR=FOLDER-OR-URL is where the archive is taken from instead of its own address.
Run again, it does what is missing. DIR/raw has the text as it was published, DIR/counts the numbers of pairs, and
DIR/removed.tsv says which pairs were removed and why.
END_OF_USAGE
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/prepare.sh
source "$root/scripts/lib/prepare.sh"

dest=$root/runs/data/iwslt14_de_en
archive="" sha256=""
lower=1
straighten="test"
clean="1 175 1.5"
valid_every=23
while [[ $# -gt 0 ]]; do
    case $1 in
    --dest) option_value "$1" $#; dest=$2; shift 2 ;;
    --archive) option_value "$1" $#; archive=$2; shift 2 ;;
    --sha256) option_value "$1" $#; sha256=$2; shift 2 ;;
    --bpe) option_value "$1" $#; operations=$2; shift 2 ;;
    --workers) option_value "$1" $#; workers=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
[[ -z $archive || -f $archive ]] || die "there is no archive '$archive' (--archive)"
[[ -z $archive || -z $sha256 ]] || die "--sha256 is for a download; --archive takes a file as it is"
check_preparation
open_folder "$dest"

# text/archive has the checksum of the archive that the text is from.
if [[ -z $archive ]]; then
    archive=$dest/download/$(basename "$url")
    # With the text there, an archive that was removed to save space is not missed.
    [[ -f $dest/text/archive && ! -f $archive ]] || step fetch "$url" "$archive" ${sha256:+--sha256 "$sha256"}
fi
if [[ -f $archive ]]; then
    checksum=$(sha256sum <"$archive")
    if [[ $(cat "$dest/text/archive" 2>/dev/null) != "$checksum" ]]; then
        say "extracting the text of $archive"
        members=()
        for lang in "$source" "$target"; do
            members+=(--member "$corpus/train.tags.$corpus.$lang")
            for name in "${test_sets[@]}"; do
                members+=(--member "$corpus/IWSLT14.$name.$corpus.$lang.xml")
            done
        done
        rm -rf "$dest/unpacked" "$dest/text.partial"
        step unpack "$archive" "$dest/unpacked" "${members[@]}"
        make_folder "$dest/text.partial"
        for lang in "$source" "$target"; do
            step strip_tags train "$dest/unpacked/$corpus/train.tags.$corpus.$lang" "$dest/text.partial/train.$lang"
            files=()
            for name in "${test_sets[@]}"; do
                files+=("$dest/unpacked/$corpus/IWSLT14.$name.$corpus.$lang.xml")
            done
            step strip_tags segments "$dest/text.partial/test.$lang" "${files[@]}"
        done
        write_text "$dest/text.partial/archive" "$checksum"
        take_text "$dest" "$source" "$target" "$archive"
    fi
fi
prepare_corpus "$dest" "$source" "$target" "$dest/text"
for split in train valid test; do
    expected=expected_$split
    [[ $(count "$dest" "$split") -eq ${!expected} ]] || {
        say "the original archive and Moses' tokenizer give $expected_train train, $expected_valid valid, $expected_test test: there is a difference"
        break
    }
done
