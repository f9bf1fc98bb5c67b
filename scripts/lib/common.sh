# shellcheck shell=bash
# What all scripts share: the root of the repository, options, messages, the environment, signals. Sourced, never run.
#
#   usage() { cat <<'END'                                   A script defines its usage text,
#   usage: scripts/NAME.sh --corpus DIR [options]
#     --corpus DIR   two spaces, the option, its value, two spaces or more, what it does
#     --keep-case    without a value: a flag
#   END
#   }
#   # shellcheck source=lib/common.sh
#   source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
#   corpus="" keep_case=0                                   the defaults of its options,
#   parse_options "$@"                                      and has them set by the command line.

unset CDPATH # with it, `cd FOLDER` may go to another folder of that name, and prints where it went
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd)
export PYTHONUTF8=1 # Python reads and writes UTF-8 whatever the locale

# say TEXT: a line of progress, on stderr so that results can be piped.
say() { echo "[$(basename "$0" .sh)] $*" >&2; }

# die TEXT: one line that says what is wrong and what to do; a mistake of the user ends with exit code 2.
die() {
    echo "$(basename "$0"): error: $*" >&2
    exit 2
}

# --- options ---

# help_text: `usage`, and what the file that the script sources adds to it (more_usage).
help_text() {
    usage
    if declare -F more_usage >/dev/null; then more_usage; fi
}

# usage_options: the options of the usage text on stdin, one a line: `--name VALUE`, or `--name` for a flag.
usage_options() { sed -nE 's/^  (--[a-z0-9-]+)( [^ ]+)?(  .*)?$/\1\2/p'; }

# parse_options ARGUMENT...: sets a variable for each option of `usage` that is given: --some-name VALUE sets some_name,
# the flag --name sets name=1, and --no-name sets name=0. Other words go to the array `arguments`; a script that takes
# them sets arguments=() before.
parse_options() {
    local options name
    options=$'\n'$(help_text | usage_options)$'\n'
    while [[ $# -gt 0 ]]; do
        name=${1#--}
        name=${name//-/_}
        if [[ $1 == -h || $1 == --help ]]; then
            help_text
            exit 0
        elif [[ $1 == --version ]]; then
            sed -n 's/^__version__ = "\(.*\)"$/pn_fairseq \1/p' "$root/pn_fairseq/__init__.py"
            exit 0
        elif [[ $1 != -* ]]; then
            declare -p arguments >/dev/null 2>&1 || die "unexpected argument '$1' (see --help)"
            arguments+=("$1")
            shift
        elif [[ $options == *$'\n'"$1 "* ]]; then
            [[ $# -ge 2 && $2 != --* ]] || die "$1 needs a value (see --help)"
            printf -v "$name" %s "$2"
            shift 2
        elif [[ $options == *$'\n'"$1"$'\n'* ]]; then
            if [[ $name == no_* ]]; then printf -v "${name#no_}" 0; else printf -v "$name" 1; fi
            shift
        else
            # shellcheck disable=SC2046
            die "unknown option '$1'$(did_you_mean "$1" $(help_text | usage_options | cut -d' ' -f1)) (see --help)"
        fi
    done
}

# did_you_mean WORD KNOWN...: ", did you mean 'X'?" for the most similar of the known words, if one is similar.
did_you_mean() {
    use_venv
    PYTHONPATH=$root python -c 'import sys
from pn_fairseq.common.command import did_you_mean
print(did_you_mean(sys.argv[1], sys.argv[2:]))' "$@" 2>/dev/null || true
}

# check_whole NAME VALUE: VALUE must be a whole number of 1 to 12 digits, at least 1.
check_whole() { [[ $2 =~ ^[1-9][0-9]{0,11}$ ]] || die "$1 must be a whole number of at least 1, not '$2'"; }

# absolute PATH: the same path from anywhere (the last part need not exist).
absolute() { if [[ $1 == /* ]]; then echo "$1"; else echo "$PWD/$1"; fi; }

# --- environment ---

# use_venv: put the project's environment first on the PATH, if there is one.
use_venv() {
    local venv=${VENV:-$root/.venv}
    [[ $venv == /* ]] || venv=$root/$venv
    [[ ! -x $venv/bin/python ]] || PATH=$venv/bin:$PATH
    export PATH
}

# need TOOL...: every tool must be on the PATH.
need() {
    local tool
    for tool; do
        command -v "$tool" >/dev/null || die "'$tool' is not installed or not on the PATH; 'make venv' installs what the scripts need"
    done
}

# run_verb VERB ARGUMENT...: `python -m pn_fairseq VERB` in place of this script.
run_verb() {
    use_venv
    need python
    # glibc gives big blocks back to the system at once, and the page faults then take longer than the arithmetic.
    # Measured on 2 cores: 0.63 against 0.26 seconds for one update of a small model.
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1000000000}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-8000000000}
    exec python -m pn_fairseq "$@"
}

# --- steps and signals ---
#
# Ctrl-C (SIGINT) and SIGTERM end the step that runs, then the script: one line that says how to resume, exit code 130 or
# 143. A script whose last command is all that is left to do may `exec` it instead; Python commands of this project
# behave in the same way.

# Bash cannot trap a signal that was ignored when it started, as SIGINT is in the background of a non-interactive shell.
if [[ $(trap -p INT) == "trap -- '' "* && -f $0 ]] && env --default-signal=INT true 2>/dev/null; then
    exec env --default-signal=INT bash "$0" "$@"
fi

# step COMMAND...: run a command to its end. If it fails the script ends with its exit code. In the background, because
# bash runs a trap only after the command in the foreground has ended.
step() {
    local failed=0
    step_of_runs "$@"
    [[ $failed -eq 0 ]] || exit 1
}

# step_of_runs COMMAND...: a step that ends with code 1 if a run failed and the others were made: it sets `failed`, and
# the script goes on. A larger code ends the script.
step_of_runs() {
    local code=0
    # The step leaves the line about an interruption to this script.
    PN_FAIRSEQ_STEP=1 "$@" &
    wait $! || code=$?
    [[ $code -le 1 ]] || exit "$code"
    [[ $code -eq 0 ]] || failed=1
}

# interrupted EXIT_CODE
interrupted() {
    local children
    trap '' INT TERM
    children=$(jobs -p)
    # Several numbers are several words.
    # shellcheck disable=SC2086
    [[ -z $children ]] || kill -TERM $children 2>/dev/null || true
    wait
    [[ -n ${PN_FAIRSEQ_STEP-} ]] || echo "$(basename "$0"): interrupted; run the same command again to resume" >&2
    exit "$1"
}
trap 'interrupted 130' INT
trap 'interrupted 143' TERM
