# shellcheck shell=bash
# How the scripts that carry an experiment from end to end show and keep what its steps print. Sourced, never run.
: "${root:?the sourcing script sets it to the top of the repository}"

# to_the_end: a reader ends with its input and not by a signal to all, or the last words would be lost, and whoever writes
# them would die of it.
to_the_end() { trap '' INT TERM; }

# show_training FOLDER TOTAL COMMAND...: run a training of TOTAL updates; a line of progress for each of fairseq's
# records, all of its output in FOLDER/train.out and train.err. Its exit code.
show_training() {
    local folder=$1 total=$2 code=0
    shift 2
    # In braces, so that this shell knows the last of the readers and can wait until train.err is whole.
    { "$@"; } > >(to_the_end; tee "$folder/train.out" | python "$root/scripts/lib/progress.py" "$total") \
        2> >(to_the_end; tee "$folder/train.err" | grep -F -e '[train]' -e 'train.sh: error' >&2) || code=$?
    wait $! || true
    return "$code"
}

# show_step FOLDER NAME COMMAND...: run a command; its errors are kept in FOLDER/NAME.err, too. Its exit code.
show_step() {
    local folder=$1 name=$2 code=0
    shift 2
    { "$@"; } 2> >(to_the_end; tee "$folder/$name.err" >&2) || code=$?
    wait $! || true
    return "$code"
}

# last_words FILE: the last line of FILE that says something.
last_words() { grep -v '^[[:space:]]*$' "$1" 2>/dev/null | tail -n 1; }

# total_updates CONFIG_FILE [key=value ...]: the most updates that a training makes with these settings.
total_updates() {
    local override total
    total=$(python "$root/scripts/lib/config_value.py" "$1" optimization.max_update)
    shift
    for override; do
        [[ $override != optimization.max_update=* ]] || total=${override#*=}
    done
    [[ $total =~ ^[0-9]+$ ]] || die "optimization.max_update must be a whole number, not '$total'"
    echo "$total"
}
