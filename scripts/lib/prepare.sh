# shellcheck shell=bash
# What the scripts that prepare a corpus share. Sourced after common.sh, never run.
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

# From the environment: MOSES=FOLDER, a checkout of mosesdecoder whose Perl scripts are used instead of sacremoses;
# BPE=subword-nmt (default) or sentencepiece.
: "${root:?}"
MOSES=${MOSES:-}
BPE=${BPE:-subword-nmt}
export MOSES PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
dest="" workers=$(nproc)
settings=()

# data STEP ARGUMENT...: a step of pn_fairseq/pipeline/data/steps.py. Paths in its arguments are paths in DEST.
data() { step python -m pn_fairseq data --dest "$dest" --workers "$workers" "$@"; }

# check_settings: `settings`, which are what the corpus needs beside the defaults, and the tools.
check_settings() {
    use_venv
    need python flock fairseq-preprocess
    check_whole --workers "$workers"
    if [[ -n $MOSES ]]; then
        MOSES=$(absolute "$MOSES")
        settings=(tokenizer=moses "${settings[@]}")
    fi
    settings=("segmentation=$BPE" "${settings[@]}")
    data check "${settings[@]}"
}

# need_text FOLDER NAME...: FOLDER must have these files, plain or .gz.
need_text() {
    local name
    [[ -d $1 ]] || die "there is no directory '$1' (--corpus)"
    for name in "${@:2}"; do
        [[ -f $1/$name || -f $1/$name.gz ]] || die "$1 has neither $name nor $name.gz"
    done
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
# those that DEST was begun with. Ends the script if there is nothing left to do.
keep_text() {
    data keep-text "$1" "${settings[@]}" "${@:2}"
    if [[ -d $dest/bin && -f $dest/counts ]]; then
        data finish
        say "$dest is complete"
        exit
    fi
}

# count NAME: a number of DEST/counts.
count() { sed -n "s/^$1=//p" "$dest/counts"; }

# finish: remove what is not needed any more, and say what there is.
finish() {
    data finish
    [[ ! -f $dest/removed.tsv ]] ||
        say "cleaning removed $(count train.removed) of $(count train.read) training pairs (which and why: $dest/removed.tsv)"
    say "$dest is complete: $(count train) train, $(count valid) valid, $(count test) test"
}
