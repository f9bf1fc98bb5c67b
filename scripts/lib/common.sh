# shellcheck shell=bash
# What all scripts here share: messages, the environment, counting, outputs that are whole or not there.
# Sourced, never run.

# With it, `cd FOLDER` may go to another folder of that name, and prints where it went.
unset CDPATH

# say TEXT: a line of progress, on stderr so that results can be piped.
say() { echo "[$(basename "$0" .sh)] $*" >&2; }

# die TEXT: one line that says what is wrong and what to do; a user's mistake ends with exit code 2.
die() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# use_venv: put the project's environment first on the PATH, if there is one.
use_venv() {
    local venv=${VENV:-$root/.venv}
    [[ $venv == /* ]] || venv=$root/$venv
    if [[ -x $venv/bin/python ]]; then
        PATH=$venv/bin:$PATH
    fi
    export PATH
}

# need TOOL...: every tool must be on the PATH.
need() {
    local tool
    for tool; do
        command -v "$tool" >/dev/null || die "'$tool' is not installed or not on the PATH; 'make venv' installs what the scripts need"
    done
}

# option_value OPTION COUNT: for `--option VALUE` pairs, COUNT is the number of words left.
option_value() { [[ $2 -ge 2 ]] || die "$1 needs a value (see --help)"; }

# check_whole NAME VALUE: VALUE must be a whole number of at least 1.
check_whole() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 must be a whole number of at least 1, not '$2'"; }

# absolute PATH: the same path from anywhere (the last part need not exist).
absolute() {
    case $1 in
    /*) printf '%s\n' "$1" ;;
    *) printf '%s\n' "$PWD/$1" ;;
    esac
}

# lines FILE: its number of lines. A last line without a newline counts, as every tool here reads it.
lines() { awk 'END { print NR }' "$1"; }

# same_lines FILE FILE...: all must have the same number of lines.
same_lines() {
    local first=$1 expected file
    expected=$(lines "$first")
    for file; do
        [[ $(lines "$file") -eq $expected ]] ||
            die "$file has $(lines "$file") lines, but $first has $expected: sentences were lost"
    done
}

# make_file FILE COMMAND...: FILE with the output of COMMAND, unless it is there. A file is either whole or not there:
# it is written beside and renamed.
make_file() {
    local file=$1
    shift
    [[ ! -e $file ]] || return 0
    "$@" >"$file.partial" || {
        rm -f "$file.partial"
        die "could not make $file: '$*' failed"
    }
    mv "$file.partial" "$file"
}

# cpu_allocator: glibc gives big blocks back to the system at once, and the page faults then take longer than the
# arithmetic. Measured on 2 cores: 0.63 against 0.26 seconds for one update of a small model.
cpu_allocator() {
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1000000000}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-8000000000}
}
