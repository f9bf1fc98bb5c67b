#!/usr/bin/env bash
# Create the environment that everything here runs in, with the versions of constraints.txt and this project in editable
# mode: `make venv`. Does nothing if it is up to date; starts afresh if constraints.txt, setup.py or a variable has
# changed; compiles the C++ kernels again if their sources have changed. An existing environment keeps its interpreter
# and its torch until others are named.
#   VENV=DIR            where it is (default .venv)
#   PYTHON=python3.12   the interpreter (default: the newest of Python 3.13, 3.12 and 3.11 that is installed)
#   TORCH=cpu           the pinned torch for CPUs, without gigabytes of CUDA libraries; or else a requirement with
#                       options of pip, in place of the pinned torch: TORCH='torch==2.12.0 --extra-index-url URL'
#   TORCH_INDEX=URL     where TORCH=cpu comes from (default https://download.pytorch.org/whl/cpu)
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
venv=${VENV:-.venv}
while [[ $venv == ?*/ ]]; do venv=${venv%/}; done # "link/" is what the link points to
mark=$venv/.pn_fairseq # in every environment made here: its variables, and what it was made from
saved() { sed -n "s/^$1=//p" "$mark" 2>/dev/null || true; }
say() { echo "[make_venv] $*" >&2; }
die() { echo "make_venv.sh: error: $*" >&2 && exit 2; }
[[ ${1-} != --help ]] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit; }
[[ $# -eq 0 ]] || die "unexpected argument '$1' (see --help)"

python=${PYTHON:-$(saved python)} torch=${TORCH:-$(saved torch)}
if [[ -z $python ]]; then
    for python in python3.13 python3.12 python3.11 python3; do ! "$python" -c '' 2>/dev/null || break; done
fi
made_from=$(cat constraints.txt setup.py <(echo "$PWD $python $torch") | sha256sum | cut -d' ' -f1)
kernels=$(cat pn_fairseq/kernels/cpp/* | sha256sum | cut -d' ' -f1)
leave_mark() { printf '%s\n' "checkout=$PWD" "python=$python" "torch=$torch" "made_from=$1" "kernels=$kernels" >"$mark"; }
export CFLAGS="${CFLAGS-} -g0" # Python's own flags ask for debug information, which is 40% of the time to compile fairseq
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
options=(--quiet --no-compile -c "$venv/constraints.txt") # Python compiles a module when it is first imported
failed() {
    die "pip could not install '$*' (the reason is above). Compiling needs a C++ compiler and Python's headers (Debian, Ubuntu: apt-get install g++ python3-dev). Run the same command again to retry"
}
pip_install() { pip install "${options[@]}" "$@" >&2 || failed "$@"; }
create() {
    [[ ! -L $venv ]] ||
        die "VENV='$venv' is a link to '$(readlink "$venv")', whose contents would be removed; remove the link, or choose another VENV"
    folder=$(dirname "$(readlink -m "$venv")") owner=$(saved checkout)
    [[ ! -f ${owner:=$folder}/scripts/make_venv.sh || $PWD == "$folder" || $PWD == "$owner" ]] ||
        die "VENV='$venv' is the environment of the checkout '$owner'; choose another VENV"
    "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "no Python 3.11 to 3.13 with venv found ('$python' does not run, is too old or has no venv). Debian, Ubuntu: apt-get install python3-venv python3-dev g++; or name another one: make venv PYTHON=/path/to/python"
    [[ ! -e $venv || -f $mark ]] || rmdir "$venv" 2>/dev/null ||
        die "refusing to overwrite VENV='$venv', which this script did not create; choose another VENV"
    say "1/4 creating $venv ($(command -v "$python"), $("$python" --version))"
    { mkdir -p "$venv" && leave_mark "" && "$python" -m venv --clear "$venv" && leave_mark ""; } || die "cannot make VENV='$venv' (the reason is above)"
    cp constraints.txt "$venv/constraints.txt"
    sed -n 's/^# \(fairseq-fixed==.* --hash=.*\)/\1/p' constraints.txt >"$venv/fairseq.txt"
    pip_install pip
    # torch first: what needs torch then finds it and does not bring another build. Its own index is asked for nothing
    # else: it need not have the versions of constraints.txt, and pip tries one that it cannot reach for each package.
    wanted=${torch:-torch}
    [[ $torch != cpu ]] ||
        wanted="torch==$(sed -n 's/^torch==//p' constraints.txt)+cpu --no-deps --retries 1 --timeout 15 --index-url ${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
    say "2/4 installing $wanted"
    # shellcheck disable=SC2086 # a requirement and options of pip
    if [[ $torch == cpu ]]; then
        answer=$(pip install "${options[@]}" $wanted 2>&1) ||
            say "not from there (${answer##*$'\n'}): trying the usual index, whose torch may bring gigabytes of CUDA libraries"
    elif [[ -n $torch ]]; then # instead of the pins of torch and of what belongs to it
        sed -i -E '/^(torch|torchaudio|triton)==/d' "$venv/constraints.txt"
        pip_install $torch
    elif ! command -v nvidia-smi >/dev/null; then
        say "no GPU found (no nvidia-smi): torch brings gigabytes of CUDA libraries; to avoid them, stop and run: make venv TORCH=cpu"
    fi
    pip_install torch numpy cython setuptools wheel
    pip freeze | grep '^torch==' >>"$venv/constraints.txt" || true
}

if [[ $(saved made_from) != "$made_from" || ! -x $venv/bin/python ]]; then
    create
elif [[ $(saved kernels) == "$kernels" ]]; then
    exit 0
fi
say "3/4 compiling fairseq and the C++ kernels (2 minutes on 2 idle cores; what is compiled already is kept)"
# Both at once, without their dependencies, which come then. In the foreground, so that Ctrl-C reaches them.
printf '%s\n' "--requirement=$venv/fairseq.txt" --editable=. |
    xargs -d '\n' -n 1 -P 2 "$venv/bin/python" -m pip --disable-pip-version-check install "${options[@]}" --no-deps --no-build-isolation >&2 ||
    failed "fairseq and pn_fairseq"
say "4/4 installing the other packages"
pip_install 'pn-fairseq[fairseq,test]'
leave_mark "$made_from"
say "done; activate it with: . $venv/bin/activate"
