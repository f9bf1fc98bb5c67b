# shellcheck shell=bash
# The steps from raw text to fairseq's binary data, shared by all prepare_*.sh. Sourced, never run.
# Every step leaves whole files or none, and is skipped where its files are there.
: "${root:?the sourcing script sets it to the top of the repository}"

# Python reads and writes UTF-8 whatever the locale of the machine.
export PYTHONUTF8=1

# unpack_text FILE: FILE or FILE.gz on stdout.
unpack_text() {
    if [[ -f $1 ]]; then cat "$1"; else gzip -dc "$1.gz" 2>/dev/null; fi
}

# tokenize LANG WORKERS LOWER FILE: Moses-style tokens of FILE on stdout, lower-cased if LOWER is 1.
tokenize() {
    if [[ $3 -eq 1 ]]; then
        sacremoses -l "$1" -j "$2" -q tokenize <"$4" | lower_case
    else
        sacremoses -l "$1" -j "$2" -q tokenize <"$4"
    fi
}

lower_case() { python -c 'import sys; sys.stdout.writelines(line.lower() for line in sys.stdin)'; }

# learn_joint_bpe OPERATIONS FILE...: merge operations learned on all FILEs together, on stdout.
learn_joint_bpe() {
    local operations=$1
    shift
    cat "$@" | subword-nmt learn-bpe -s "$operations" 2>/dev/null
}

# apply_joint_bpe CODES FILE: FILE in subwords, on stdout.
apply_joint_bpe() { subword-nmt apply-bpe -c "$1" <"$2"; }

# binarize FOLDER SOURCE TARGET WORKERS: FOLDER/bin, fairseq's binary data with one dictionary for both languages, from
# FOLDER/bpe.
binarize() {
    local folder=$1 source=$2 target=$3 workers=$4 split lang count
    [[ ! -d $folder/bin ]] || return 0
    rm -rf "$folder/bin.partial"
    # From within the folder, because fairseq-preprocess splits the names it is given at commas.
    (
        cd "$folder"
        fairseq-preprocess --source-lang "$source" --target-lang "$target" --joined-dictionary \
            --trainpref bpe/train --validpref bpe/valid --testpref bpe/test \
            --destdir bin.partial --workers "$workers" >bpe/binarize.log 2>&1
    ) || die "fairseq-preprocess failed: $(tail -n 1 "$folder/bpe/binarize.log") (all of it in $folder/bpe/binarize.log)"
    for split in train valid test; do
        for lang in "$source" "$target"; do
            count=$(python "$root/scripts/lib/count_binarized.py" "$folder/bin.partial/$split.$source-$target.$lang.idx")
            [[ $count -eq $(lines "$folder/bpe/$split.$lang") ]] ||
                die "$folder/bin.partial has $count sentences of $split.$lang, but bpe/$split.$lang has $(lines "$folder/bpe/$split.$lang"): sentences were lost"
        done
    done
    mv "$folder/bin.partial" "$folder/bin"
}

# keep_settings FILE TEXT: remember what a directory was made with, and refuse to go on with something else.
keep_settings() {
    local file=$1 text=$2
    if [[ -f $file ]]; then
        [[ $(<"$file") == "$text" ]] ||
            die "$(dirname "$file") was made with other settings or other text (see $file); remove it or name another directory"
    else
        printf '%s\n' "$text" >"$file.partial"
        mv "$file.partial" "$file"
    fi
}
