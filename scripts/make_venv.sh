#!/usr/bin/env bash
# Create the virtual environment that everything here runs in. Called by `make venv`.
set -euo pipefail

usage() {
    cat <<'END'
usage: [VENV=DIR] [PYTHON=python3.11] [TORCH=REQUIREMENT] scripts/make_venv.sh

Creates VENV (default .venv) with the versions of constraints.txt and this project in editable mode. Does nothing if
that was done before with the same settings; starts afresh if constraints.txt, setup.py or a setting has changed, and
compiles the C++ kernels again if their sources have, or if they are not there and there is a compiler. Where they
cannot be compiled, one line says so.

  TORCH   a pip requirement in place of the pinned torch, for a CUDA or other build, with pip's options if need be:
          TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'

An environment that was made with another interpreter or torch keeps them until another is named.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
cd "$root"

[[ ${1-} != -h && ${1-} != --help ]] || { usage; exit 0; }
[[ $# -eq 0 ]] || die "unexpected argument '$1' (see --help)"

venv=${VENV:-.venv}
minimum=3.11
maximum=3.12 # the newest that fairseq-fixed names

# In every environment made here: interpreter and torch that were asked for, and, once it is complete, its key, the
# sources of the C++ kernels, none where they could not be compiled, and the file that they were compiled to.
mark=$venv/.pn_fairseq
kept() { sed -n "s/^$1=//p" "$mark" 2>/dev/null || true; }
python=${PYTHON:-$(kept python)}
python=${python:-python3}
torch=${TORCH:-$(kept torch)}

# 1. Is it there already?
key=$({ cat constraints.txt setup.py; echo "$root $python $torch"; } | sha256sum | cut -d' ' -f1)
kernels=$(cat pn_fairseq/kernels/cpp/* | sha256sum | cut -d' ' -f1)
complete() { [[ $(kept key) == "$key" && -x $venv/bin/python ]]; }
no_compiler() { # Prints which one is missing; fails if none is.
    local compiler
    for compiler in "${CC:-cc}" "${CXX:-c++}"; do
        command -v "${compiler%% *}" >/dev/null || { echo "$compiler"; return; }
    done
    return 1
}
has_kernels() { [[ $(kept kernels) == "$kernels" && -f $(kept library) ]]; }
could_not_have() { [[ $(kept kernels) =~ ^(none|"$kernels")$ ]] && no_compiler >/dev/null; }
if complete && { has_kernels || could_not_have; }; then
    exit 0
fi

leave_mark() { # KEY [LIBRARY]
    local compiled=none
    [[ -z ${2-} ]] || compiled=$kernels
    printf '%s\n' "python=$python" "torch=$torch" "key=$1" "kernels=$compiled" "library=${2-}" >"$mark"
}
constraints=$venv/constraints.txt
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install -c "$constraints" "$@" >"$venv/pip.log" 2>&1 || {
        tail -n 15 "$venv/pip.log" >&2
        die "pip could not install '$*' (its last lines stand above, all in $venv/pip.log); run the same command again to retry"
    }
}
install_this() {
    pip_install --verbose --no-build-isolation "$@"
    sed -n 's/^ *pn_fairseq: \(.* without .*\)/\1/p' "$venv/pip.log" | sort -u | while read -r line; do say "$line"; done
    library=$(PN_FAIRSEQ_KERNELS=reference "$venv/bin/python" -c "$find_library") ||
        die "pn_fairseq was installed, but cannot be imported (the reason stands above)"
    leave_mark "$key" "$library"
}
find_library='
import importlib.util
from pn_fairseq.kernels import selection
print(getattr(importlib.util.find_spec(selection.EXTENSION), "origin", ""))'
if complete; then
    say "compiling the C++ kernels"
    install_this --no-deps -e .
    exit 0
fi

# 2. Can it be made? Each thing that fails late or with a page of text when missing is looked for here.
command -v "$python" >/dev/null || die "no '$python' found; install Python $minimum or $maximum, or name one: make venv PYTHON=/path/to/python"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "'$python' does not run"
"$python" -c "import sys; sys.exit(not (${minimum/./, }) <= sys.version_info[:2] <= (${maximum/./, }))" ||
    die "'$python' is Python $found, but $minimum or $maximum is needed; name one: make venv PYTHON=/path/to/python"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python' comes without venv; on Debian or Ubuntu: apt install python$found-venv"
# fairseq comes as source; who has it compiled already needs no compiler, our own kernels being optional.
fairseq_is_compiled() {
    local version tag
    version=$(sed -n 's/^fairseq-fixed==//p' constraints.txt)
    tag=cp${found/./}
    "$python" -m pip cache list 'fairseq_fixed*' 2>/dev/null | grep -q -- "fairseq_fixed-$version-$tag-" ||
        "$python" -m pip download --quiet --no-deps --only-binary :all: -d "$wheels" "fairseq-fixed==$version" >/dev/null 2>&1
}
missing=
if compiler=$(no_compiler); then
    missing="no C/C++ compiler '$compiler' found (fairseq is compiled during set-up); on Debian or Ubuntu: apt install g++"
fi
header=$("$python" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))')
[[ -f $header ]] ||
    missing="no $header (fairseq is compiled during set-up); on Debian or Ubuntu: apt install python$found-dev"
if [[ -n $missing ]]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    fairseq_is_compiled || die "$missing"
    say "no compiler that can be used: pip has fairseq compiled, and the norms will do without their C++ kernels"
fi
if [[ -e $venv && ! -f $mark ]] && [[ ! -d $venv || -n $(ls -A "$venv") ]]; then
    die "VENV='$venv' exists and was not made by this script; it is left alone, name another place"
fi

# 3. Make it. torch first: whatever needs torch then finds it and does not pull another build.
say "creating $venv ($(command -v "$python"), Python $found); this takes a few minutes"
{ mkdir -p "$venv" && leave_mark ""; } || die "cannot make the directory '$venv' (VENV)"
"$python" -m venv --clear "$venv" || die "'$python -m venv' failed (its reason stands above)"
leave_mark ""
cp constraints.txt "$constraints"
pip_install pip
if [[ -n $torch ]]; then
    say "installing $torch"
    # The pin gives way to what was asked for, and to the triton that belongs to it.
    sed -i -E '/^(torch|torchaudio|triton)==/d' "$constraints"
    # shellcheck disable=SC2086 # TORCH may hold options of pip beside the requirement
    pip_install $torch
    "$venv/bin/python" -m pip freeze | grep '^torch==' >>"$constraints" || true
else
    say "installing torch"
    pip_install torch
fi
say "installing what fairseq is built with"
pip_install numpy cython setuptools wheel
say "building fairseq (a minute or two)"
pip_install --no-build-isolation fairseq-fixed
say "installing pn_fairseq and its tools"
install_this -e '.[test]'
say "done"
