# shellcheck shell=bash
# The steps from raw text to fairseq's binary data, shared by all prepare_*.sh. Sourced, never run.
#
# A script of a corpus does this:
#
#   operations=10000 lower=1 clean="1 175 1.5"    what differs from the defaults below; its options may change it
#   check_preparation                             the settings, BPE, MOSES and the tools, before anything is downloaded
#   open_folder DEST                              make DEST and lock it
#   make_folder DEST/text.partial                 and put the text there: train, valid and test in both languages
#                                                 (train.de, train.en, ...), one sentence a line; no valid if
#                                                 `valid_every` takes it from train
#   take_text DEST SOURCE TARGET                  checked (UTF-8, nothing empty, as many lines in both languages) and
#                                                 compared with the text of an earlier run, it becomes DEST/text
#   prepare_corpus DEST SOURCE TARGET DEST/text   all the rest
#
# and has afterwards
#
#   DEST/raw  the text before tokenization          DEST/bpe  subwords, and codes or sentencepiece.model
#   DEST/tok  tokenized, as it is scored            DEST/bin  fairseq's binary data, one dictionary for both languages
#   DEST/settings  what it was made with, key=value, then the checksums of the text
#   DEST/counts    key=value: SPLIT, the pairs in it; SPLIT.read and SPLIT.removed where cleaning was asked for
#   DEST/removed.tsv  (with cleaning) each removed pair: split, line in text/, reason, tokens of both sides
#
# raw, tok, bpe and bin hold the same sentences, line by line. Cleaning and only cleaning removes pairs; everything else
# is counts in = counts out, checked. Every step leaves whole files or none and is skipped where its files are there:
# interrupted anywhere and started again, the same bytes come out, whatever the number of workers.

: "${root:?the sourcing script sets it to the top of the repository}"

# What a script sets before check_preparation:
operations=10000     # BPE merges (BPE=sentencepiece: the size of the vocabulary)
workers=$(nproc)     # processes
straighten=""        # splits whose typographic apostrophes become plain ones in tok/ (not in raw/): "test", "valid test"
normalize=0          # 1: normalise punctuation, as normalize-punctuation.perl
nonprinting=0        # 1: characters that are not printed become spaces, as remove-non-printing-char.perl
aggressive=0         # 1: split hyphens within words off as @-@
lower=0              # 1: lower-case
clean=""             # "MIN MAX RATIO": remove pairs by their length, as clean-corpus-n.perl; "": remove nothing
clean_stage=tok      # what is counted: tok, tokens (BPE is learned on what is kept); bpe, subwords (BPE is learned on all)
clean_splits=train   # which splits are cleaned: train, or train,valid
valid_every=0        # N: each N-th pair of the cleaned training text is the validation set; 0: text/ has one
compound_split=0     # 1: recorded for score.sh, which then splits compounds at hyphens (##AT##-##AT##)

# From the environment: MOSES=FOLDER, a checkout of mosesdecoder whose Perl scripts are used instead of sacremoses;
# BPE=subword-nmt (default) or sentencepiece.
MOSES=${MOSES:-}
BPE=${BPE:-subword-nmt}

# Python reads and writes UTF-8 whatever the locale of the machine.
export PYTHONUTF8=1

# The settings that are not recorded by older versions, as they were then.
default_settings="segmentation=subword-nmt
tokenizer=sacremoses
straighten=
normalize=0
nonprinting=0
aggressive=0
compound_split=0
clean=
clean_stage=tok
clean_splits=train
valid_every=0"

# step NAME ARGUMENT...: run scripts/lib/NAME.py, which says in one line what is wrong, and leaves with its exit code.
step() {
    local name=$1
    shift
    python "$root/scripts/lib/$name.py" "$@" || exit
}

# check_preparation: the settings above, BPE and MOSES must be usable, and the tools there.
check_preparation() {
    local script scripts=(tokenizer/tokenizer.perl)
    check_whole --bpe "$operations"
    check_whole --workers "$workers"
    case $BPE in
    subword-nmt | sentencepiece) ;;
    *) die "BPE must be subword-nmt or sentencepiece, not '$BPE'" ;;
    esac
    if [[ -n $MOSES ]]; then
        [[ -d $MOSES ]] || die "MOSES must be a checkout of mosesdecoder, and '$MOSES' is no folder"
        [[ $lower -eq 0 ]] || scripts+=(tokenizer/lowercase.perl)
        [[ $normalize -eq 0 ]] || scripts+=(tokenizer/normalize-punctuation.perl)
        [[ $nonprinting -eq 0 ]] || scripts+=(tokenizer/remove-non-printing-char.perl)
        for script in "${scripts[@]}"; do
            [[ -f $MOSES/scripts/$script ]] || die "MOSES=$MOSES is no checkout of mosesdecoder: scripts/$script is missing"
        done
        need perl
    fi
    use_venv
    need python flock sha256sum fairseq-preprocess
    [[ -z $MOSES ]] || MOSES=$(absolute "$MOSES")
}

# open_folder DEST: make it, and keep others from working in it at the same time; they wait.
open_folder() {
    mkdir -p "$1" 2>/dev/null || die "cannot make the directory '$1' (--dest)"
    # The processes of this script hold the lock, too: what was left running by a kill -9 is waited for.
    { exec {lock}>>"$1/.lock"; } 2>/dev/null || die "cannot write in '$1' (--dest)"
    opened=$1
    flock -n "$lock" || {
        say "something else prepares $1; waiting for it to end"
        flock "$lock"
    }
    trap 'rm -rf "$opened"/{unpacked,text.partial,raw.partial,bin.partial}' EXIT
}

# make_folder FOLDER: a new one.
make_folder() { mkdir -p "$1" 2>/dev/null || die "cannot make the directory '$1'"; }

# write_text FILE TEXT: a small file, whole or not there.
write_text() {
    { printf '%s\n' "$2" >"$1.partial" && mv "$1.partial" "$1"; } 2>/dev/null || {
        rm -f "$1.partial"
        die "cannot write '$1'; is the disk full?"
    }
}

# splits_of_text: the splits that text/ holds.
splits_of_text() {
    if [[ $valid_every -gt 0 ]]; then echo train test; else echo train valid test; fi
}

# check_texts TEXT SOURCE TARGET [NAME [OPTION]]: the text must be usable. NAME is what TEXT is called in messages.
# OPTION --allow-carriage-returns: a carriage return within a line is white space, as it is for Moses.
check_texts() {
    local text=$1 source=$2 target=$3 name=${4:-$1} split files=()
    for split in $(splits_of_text); do
        files+=("$text/$split.$source" "$name/$split.$source" "$text/$split.$target" "$name/$split.$target")
    done
    step check_text ${5:+"$5"} "${files[@]}"
}

# need_files CORPUS SOURCE TARGET TEST: a local folder must have train, valid and the test set TEST in both languages.
need_files() {
    local corpus=$1 lang name
    for name in train valid "$4"; do
        for lang in "$2" "$3"; do
            [[ -f $corpus/$name.$lang || -f $corpus/$name.$lang.gz ]] || die "$corpus has neither $name.$lang nor $name.$lang.gz"
        done
    done
}

# copy_files TEXT CORPUS SOURCE TARGET TEST: TEXT from these files, unpacked and checked. It is made anew each time, so that
# a corrected file is noticed and a changed one refused.
copy_files() {
    local text=$1 corpus=$2 source=$3 target=$4 split name lang copies=() checks=()
    rm -rf "$text"
    make_folder "$text"
    for split in train valid test; do
        name=$split
        [[ $split != test ]] || name=$5
        for lang in "$source" "$target"; do
            copies+=("$corpus/$name.$lang" "$text/$split.$lang")
            checks+=("$text/$split.$lang" "$corpus/$name.$lang")
        done
    done
    step copy_text "${copies[@]}"
    step check_text "${checks[@]}"
}

# other_settings FILE: its lines without those that say what is meant without them.
other_settings() { grep -vxF "$default_settings" "$1" || true; }

# keep_settings FILE TEXT: remember what a directory was made with, and refuse to go on with something else.
keep_settings() {
    local file=$1 text=$2
    if [[ -f $file ]]; then
        [[ $(other_settings "$file") == "$(other_settings <(printf '%s\n' "$text"))" ]] ||
            die "$(dirname "$file") was made with other settings or other text (see $file); remove it or name another directory"
    else
        write_text "$file" "$text"
    fi
}

# take_text DEST SOURCE TARGET [NAME]: DEST/text.partial becomes DEST/text, if it can be used and is what DEST was begun
# with. NAME is what it is called in messages.
take_text() {
    check_texts "$1/text.partial" "$2" "$3" "${4:-$1/text}"
    keep_settings "$1/settings" "$(settings_of "$1/text.partial" "$2" "$3")"
    rm -rf "$1/text"
    mv "$1/text.partial" "$1/text"
}

# settings_of TEXT SOURCE TARGET: what DEST/settings says.
settings_of() {
    local text=$1 source=$2 target=$3 split files=()
    for split in $(splits_of_text); do
        files+=("$split.$source" "$split.$target")
    done
    cat <<END
source=$source
target=$target
lower=$lower
bpe=$operations
segmentation=$BPE
tokenizer=$(if [[ -n $MOSES ]]; then echo moses; else echo sacremoses; fi)
straighten=$straighten
normalize=$normalize
nonprinting=$nonprinting
aggressive=$aggressive
compound_split=$compound_split
clean=$clean
clean_stage=$clean_stage
clean_splits=$clean_splits
valid_every=$valid_every
END
    (cd "$text" && sha256sum "${files[@]}")
}

# tokenize_texts FROM TO SOURCE TARGET SPLIT...
tokenize_texts() {
    local from=$1 to=$2 source=$3 target=$4 split lang files=() straight=() flags=()
    shift 4
    [[ -z $MOSES ]] || flags+=(--moses "$MOSES")
    [[ $normalize -eq 0 ]] || flags+=(--normalize)
    [[ $nonprinting -eq 0 ]] || flags+=(--nonprinting)
    [[ $aggressive -eq 0 ]] || flags+=(--aggressive)
    [[ $lower -eq 0 ]] || flags+=(--lower)
    flags+=(--workers "$workers")
    make_folder "$to"
    for lang in "$source" "$target"; do
        for split; do
            if [[ " $straighten " == *" $split "* ]]; then
                straight+=("$lang" "$from/$split.$lang" "$to/$split.$lang")
            else
                files+=("$lang" "$from/$split.$lang" "$to/$split.$lang")
            fi
        done
    done
    [[ ${#files[@]} -eq 0 ]] || step transform_text "${flags[@]}" "${files[@]}"
    [[ ${#straight[@]} -eq 0 ]] || step transform_text --straighten "${flags[@]}" "${straight[@]}"
}

# segment_texts FROM TO SOURCE TARGET SPLIT...: learn the subwords on FROM/train, and apply them to all.
segment_texts() {
    local from=$1 to=$2 source=$3 target=$4 model=$2/codes split lang files=()
    shift 4
    [[ $BPE == subword-nmt ]] || model=$to/sentencepiece.model
    make_folder "$to"
    say "learning $operations BPE operations on both languages with $BPE"
    step subwords learn "$BPE" "$operations" "$model" --workers "$workers" "$from/train.$source" "$from/train.$target"
    for split; do
        for lang in "$source" "$target"; do
            files+=("$from/$split.$lang" "$to/$split.$lang")
        done
    done
    say "applying BPE"
    step subwords apply "$BPE" "$model" --workers "$workers" "${files[@]}"
}

# select_texts DEST SOURCE TARGET TEXT: raw/, tok/ and, if subwords were counted, bpe/ from TEXT and DEST/stages.
select_texts() {
    local dest=$1 source=$2 target=$3 text=$4 splits file model flags=()
    local folders=("raw=$text" "tok=$dest/stages/tok")
    [[ ! -f $dest/counts ]] || return 0
    if [[ ! -d $dest/stages/selected ]]; then
        splits=$(splits_of_text)
        say "selecting pairs${clean:+ of (minimum, maximum, ratio) $clean}"
        [[ $clean_stage == tok ]] || folders+=("bpe=$dest/stages/bpe")
        # The three numbers of $clean are three words.
        # shellcheck disable=SC2206
        [[ -z $clean ]] || flags+=(--clean $clean --clean-splits "$clean_splits")
        step select_pairs --source "$source" --target "$target" --splits "${splits// /,}" --by "$clean_stage" \
            --output "$dest/stages/selected" ${flags[@]+"${flags[@]}"} --valid-every "$valid_every" "${folders[@]}"
    fi
    # `counts` comes last and says that all is there.
    for file in raw tok bpe removed.tsv counts; do
        [[ -e $dest/stages/selected/$file ]] || continue
        rm -rf "${dest:?}/$file"
        if [[ $file == bpe ]]; then
            model=codes
            [[ $BPE == subword-nmt ]] || model=sentencepiece.model
            cp "$dest/stages/bpe/$model" "$dest/stages/selected/bpe" || die "cannot write '$dest/bpe/$model'"
        fi
        mv "$dest/stages/selected/$file" "$dest/$file"
    done
}

# link_raw DEST TEXT: raw/ is the text itself.
link_raw() {
    [[ ! -d $1/raw ]] || return 0
    rm -rf "$1/raw.partial"
    { cp -rl "$2" "$1/raw.partial" 2>/dev/null || cp -r "$2" "$1/raw.partial"; } || die "cannot write '$1/raw'"
    mv "$1/raw.partial" "$1/raw"
}

# count DEST NAME: a number of DEST/counts.
count() { sed -n "s/^$2=//p" "$1/counts"; }

# prepare_corpus DEST SOURCE TARGET TEXT: from checked text to DEST/bin, by the settings above. TEXT is a folder in the
# file system of DEST; a run that finds everything done says so and does nothing.
prepare_corpus() {
    local dest=$1 source=$2 target=$3 text=$4 splits split tokenizer=sacremoses
    read -ra splits < <(splits_of_text)
    keep_settings "$dest/settings" "$(settings_of "$text" "$source" "$target")"
    if [[ -d $dest/bin && -f $dest/counts ]]; then
        say "$dest is complete"
        return
    fi
    [[ -z $MOSES ]] || tokenizer=$MOSES
    if [[ -z $clean && $valid_every -eq 0 ]]; then
        link_raw "$dest" "$text"
        say "tokenizing with $tokenizer"
        tokenize_texts "$dest/raw" "$dest/tok" "$source" "$target" "${splits[@]}"
    else
        if [[ ! -f $dest/counts && ! -d $dest/stages/selected ]]; then
            say "tokenizing with $tokenizer"
            tokenize_texts "$text" "$dest/stages/tok" "$source" "$target" "${splits[@]}"
            [[ $clean_stage == tok ]] ||
                segment_texts "$dest/stages/tok" "$dest/stages/bpe" "$source" "$target" "${splits[@]}"
        fi
        select_texts "$dest" "$source" "$target" "$text"
    fi
    [[ $clean_stage == bpe && -n $clean ]] ||
        segment_texts "$dest/tok" "$dest/bpe" "$source" "$target" train valid test
    say "binarizing with fairseq-preprocess"
    [[ -d $dest/bin ]] || step binarize "$dest" "$source" "$target" "$workers"
    [[ -f $dest/counts ]] || write_text "$dest/counts" "$(
        for split in train valid test; do
            echo "$split=$(lines "$dest/raw/$split.$source")"
        done
    )"
    # What was cut off in the middle and is not needed any more.
    rm -rf "$dest/stages" "$dest"/{tok,bpe}/*.partial
    if [[ -n $clean ]]; then
        say "cleaning removed $(count "$dest" train.removed) of $(count "$dest" train.read) training pairs (which and why: $dest/removed.tsv)"
    fi
    say "$dest is complete: $(count "$dest" train) train, $(count "$dest" valid) valid, $(count "$dest" test) test"
}
