# shellcheck shell=bash
# What the scripts that prepare a language model's corpus share. Sourced after common.sh, never run.
: "${root:?}"
# shellcheck source=prepare.sh
source "$root/scripts/lib/prepare.sh"

# prepare_texts NAME TRAIN VALID TEST [OPTION...]: the three texts, plain or .gz, as data in --dest
# (pn_fairseq/pipeline/data/language_model.py).
prepare_texts() {
    data lm-text "$@"
}

# begin DEST: the tools, and the folder.
begin() {
    dest=$1
    use_venv
    need python flock fairseq-preprocess
    check_whole --workers "$workers"
    open_dest
}

# find_texts FOLDER NAME...: sets texts, the absolute paths of these files of FOLDER, each plain or .gz.
find_texts() {
    local folder name
    need_text "$@"
    folder=$(absolute "$1")
    texts=()
    for name in "${@:2}"; do
        [[ -f $folder/$name ]] || name+=.gz
        texts+=("$folder/$name")
    done
}
