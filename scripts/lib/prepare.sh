# shellcheck shell=bash
# What the scripts that prepare a corpus share. Sourced, never run.
#
# Each of them leaves in DEST
#   raw/  the text before tokenization          bpe/  subwords, and codes or sentencepiece.model
#   tok/  tokenized, as it is scored            bin/  fairseq's binary data, one dictionary for both languages
#   settings  what it was made with, name=value, then the checksums of the text (pn_fairseq/pipeline/data/settings.py)
#   counts    name=value: SPLIT, the pairs in it; SPLIT.read and SPLIT.removed if there was cleaning
#   removed.tsv  (with cleaning) each removed pair: split, line in text/, reason, tokens of both sides
# raw, tok, bpe and bin have the same sentences, line by line. Cleaning removes pairs, and nothing else does.
#
# Each step leaves whole files or none and is skipped where its files are there: a script that was interrupted is started
# again and ends in the same bytes.

# more_usage: what all of them take, and the variables that matter to what `usage` says.
more_usage() {
    local about
    about=$(usage)
    cat <<'END'

  --workers N  processes (default: all cores)

The same command resumes. Line counts are checked after every step.
END
    [[ $about != *Downloads* && $about != *"joint BPE"* ]] || echo $'\nIn the environment:'
    [[ $about != *Downloads* ]] || echo "  DATA_MIRROR=DIR-OR-URL    a folder or URL that has the files to download"
    [[ $about != *"joint BPE"* ]] || cat <<'END'
  MOSES=DIR                 a checkout of mosesdecoder whose Perl scripts replace sacremoses
  BPE=subword-nmt           (default) or sentencepiece, for which --bpe is the size of the vocabulary
END
}

# shellcheck source=common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/common.sh"
MOSES=${MOSES:-}
BPE=${BPE:-subword-nmt}
export MOSES PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
dest="" workers=$(nproc)
settings=()

# data STEP ARGUMENT...: a step of pn_fairseq/pipeline/data/steps.py. Paths in its arguments are paths in DEST.
data() { step python -m pn_fairseq data --dest "$dest" --workers "$workers" "$@"; }

# check_tools: what every preparation needs.
check_tools() {
    use_venv
    need python flock fairseq-preprocess
    check_whole --workers "$workers"
}

# check_settings: the tools, and `settings`, which are what the corpus needs beside the defaults.
check_settings() {
    check_tools
    if [[ -n $MOSES ]]; then
        MOSES=$(absolute "$MOSES")
        settings=(tokenizer=moses "${settings[@]}")
    fi
    settings=("segmentation=$BPE" "${settings[@]}")
    data check "${settings[@]}"
}

# need_text FOLDER NAME...: FOLDER must have these files, plain or .gz; the steps of `data` read both.
need_text() {
    local name
    [[ -d $1 ]] || die "there is no directory '$1' (--corpus)"
    for name in "${@:2}"; do
        [[ -f $1/$name || -f $1/$name.gz ]] || die "$1 has neither $name nor $name.gz"
    done
}

# check_verses: sets verses, the corpus that is in the repository.
check_verses() {
    verses=$root/data/verses.es-en
    (cd "$verses" && sha256sum --check --status SHA256SUMS) ||
        die "$verses is damaged or incomplete; 'git checkout -- data' brings it back"
}

# open_dest: make DEST, and keep other scripts out of it.
open_dest() {
    dest=$(absolute "$dest")
    mkdir -p "$dest" 2>/dev/null || die "cannot make the directory '$dest' (--dest)"
    # The steps inherit the lock: a step that outlives a kill -9 of its script is waited for.
    { exec {lock}>>"$dest/.lock"; } 2>/dev/null || die "cannot write in '$dest' (--dest)"
    flock -n "$lock" || {
        say "another process prepares $dest; waiting for it to end"
        step flock "$lock"
    }
    trap remove_partial EXIT
    remove_partial
}
remove_partial() { rm -rf "$dest"/{unpacked,text.partial,bin.partial}; }

# get FOLDER URL [OPTION...]: the file of this URL, unless the user has named the folder (`archive`).
get() {
    local file=$1/${2##*/}
    if [[ -n $archive ]]; then
        [[ -f $file ]] || die "there is no ${2##*/} in '$1' (--archive); it comes from $2"
    else
        data fetch "$2" "$file" "${@:3}"
    fi
}

# made_of FILE...: whether DEST/text was made of these files, or of files of which one was removed since.
made_of() {
    local file
    [[ -f $dest/text/archives ]] || return 1
    for file; do
        [[ -f $file ]] || return 0
    done
    [[ $(<"$dest/text/archives") == "$(cd "$(dirname "$1")" && sha256sum "${@##*/}")" ]]
}

# keep_text FOLDER [--made-of FILE...]: DEST/text.partial, if there is one, becomes DEST/FOLDER. It and the settings must be
# those that DEST was started with. Ends the script if all steps are done.
keep_text() {
    data keep-text "$1" "${settings[@]}" "${@:2}"
    if [[ -d $dest/bin && -f $dest/counts ]]; then
        data finish
        say "$dest is complete"
        exit
    fi
}

# prepare_folder FOLDER [TEST [PAIRS...]]: all steps for train, valid and TEST (default test) of a folder, one sentence a
# line. PAIRS are the numbers of pairs that the published text has.
# shellcheck disable=SC2154 # the caller has set source and target
prepare_folder() {
    local folder test=${2-test} split name expected=("${@:3}")
    check_settings
    need_text "$1" {train,valid,"$test"}.{"$source","$target"}
    open_dest
    folder=$(absolute "$1")
    # 1. The text as it came: DEST/raw.
    for split in train valid test; do
        name=$split
        [[ $split != test ]] || name=$test
        data take as-is "text.partial/$split".{"$source","$target"} "$folder/$name".{"$source","$target"} \
            ${expected[0]+--expect "${expected[0]}"}
        expected=(${expected[@]+"${expected[@]:1}"})
    done
    keep_text raw
    # 2. Tokens, lower-cased if lower=1: DEST/tok.
    say "tokenizing with ${MOSES:-sacremoses}"
    data tokenize raw tok
    # 3. Subwords and binary data: DEST/bpe, DEST/bin.
    segment
    binarize
}

# segment: DEST/tok in subwords, DEST/bpe. They are learned on both languages.
# shellcheck disable=SC2154 # the caller has set bpe
segment() {
    say "learning $bpe BPE operations on both languages with $BPE"
    data learn-bpe tok bpe
    say "applying BPE"
    data apply-bpe tok bpe
}

# binarize: DEST/bpe as fairseq's binary data, DEST/bin; then remove what is not needed any more, and say what there is.
binarize() {
    say "binarizing with fairseq-preprocess"
    data binarize
    data finish
    [[ ! -f $dest/removed.tsv ]] ||
        say "cleaning removed $(count train.removed) of $(count train.read) training pairs (which and why: $dest/removed.tsv)"
    say "$dest is complete: $(count train) train, $(count valid) valid, $(count test) test"
}

# count NAME: a number of DEST/counts.
count() { sed -n "s/^$1=//p" "$dest/counts"; }
