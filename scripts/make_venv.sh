#!/usr/bin/env bash
# Create the virtual environment that everything here runs in. Called by `make venv`.
set -euo pipefail

usage() {
    cat <<'END'
usage: [VENV=DIR] [PYTHON=python3.13] [TORCH=cpu|REQUIREMENT] scripts/make_venv.sh

Creates VENV (default .venv) with the versions of constraints.txt and this project in editable mode. Does nothing if the
environment is up to date. Starts afresh if constraints.txt, setup.py or a setting has changed. Compiles the C++ kernels
again if their sources have changed, or if a compiler was installed since. One line says so if that fails.

  PYTHON  the interpreter; default: the newest of Python 3.13, 3.12 and 3.11 that is installed
  TORCH   cpu: the pinned torch for CPUs alone, without gigabytes of CUDA libraries; otherwise a pip requirement that
          replaces the pinned torch, with options of pip: TORCH='torch==2.12.0 --index-url https://example.org'

An existing environment keeps its interpreter and its torch until others are named.
END
}

# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
parse_options "$@"
cd "$root"

venv=${VENV:-.venv}
mark=$venv/.pn_fairseq # in every environment made here: its settings, and the state that it was made from
saved() { sed -n "s/^$1=//p" "$mark" 2>/dev/null || true; }
compiler=$(command -v "${CXX:-c++}" || echo none)

# 1. The interpreter.
is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=${PYTHON:-$(saved python)}
if [[ -z $python ]]; then
    for python in python3.13 python3.12 python3.11 python3; do ! is_supported "$python" || break; done
fi
torch=${TORCH:-$(saved torch)}

# 2. Is everything there already?
key=$({ cat constraints.txt setup.py; echo "$root $python $torch"; } | sha256sum | cut -d' ' -f1)
kernels=$(cat pn_fairseq/kernels/cpp/* | sha256sum | cut -d' ' -f1)
library=$(saved library)
is_complete() { [[ $(saved key) == "$key" && -x $venv/bin/python ]]; }
has_kernels() { # or cannot have them: there is no compiler, or it has failed before
    [[ $(saved kernels) == "$kernels" ]] || return
    [[ -f $library || $compiler == none ]] || [[ -z $library && $(saved compiler) == "$compiler" ]]
}
if is_complete && has_kernels; then exit 0; fi

leave_mark() { # KEY LIBRARY
    printf '%s\n' "python=$python" "torch=$torch" "key=$1" "kernels=$kernels" "compiler=$compiler" "library=$2" >"$mark"
}
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install -c "$venv/constraints.txt" "$@" >"$venv/pip.log" 2>&1 || {
        tail -n 15 "$venv/pip.log" >&2
        die "pip could not install '$*' (its last lines are above, all in $venv/pip.log); run the same command again to retry"
    }
}
install_this() {
    pip_install --verbose --no-build-isolation "$@"
    sed -n 's/^ *pn_fairseq: \(.* without .*\)/\1/p' "$venv/pip.log" | sort -u | while read -r line; do say "$line"; done
    library=$(find "$root/pn_fairseq/kernels" -name '_cpp_*.so' -newer "$mark" | head -n 1)
    leave_mark "$key" "$library"
}
if is_complete; then
    say "compiling the C++ kernels"
    install_this --no-deps -e .
    exit 0
fi

# 3. Can it be made? What would fail late is looked for here.
is_supported "$python" || die "no Python 3.11 to 3.13 found ('$python' does not run or is too old); on Debian or Ubuntu: apt-get install python3 python3-venv python3-dev g++; or name one: make venv PYTHON=/path/to/python"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.1[123] ]] || say "Python $version is untried; 3.11, 3.12 and 3.13 are tested"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python' comes without venv; on Debian or Ubuntu: apt-get install python$version-venv"
packages=
[[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] || packages=" python$version-dev"
[[ $compiler != none ]] || packages+=" g++"
if [[ -n $packages ]]; then # fairseq comes as source; once compiled, it is in pip's cache
    "$python" -m pip cache list 'fairseq_fixed*' 2>/dev/null | grep -q -- "-cp${version/./}-" ||
        die "no C++ compiler '${CXX:-c++}' or no headers of Python, which fairseq is compiled with; on Debian or Ubuntu: apt-get install$packages"
    say "no C++ compiler or no headers of Python: fairseq comes from pip's cache, the norms have no C++ kernels"
fi
if [[ -e $venv && ! -f $mark ]] && [[ ! -d $venv || -n $(ls -A "$venv") ]]; then
    die "refusing to overwrite VENV='$venv', which this script did not create; choose another VENV"
fi

# 4. Make it. torch first: what needs torch then finds it and does not pull another build.
say "creating $venv ($(command -v "$python"), Python $version); this takes a few minutes"
{ mkdir -p "$venv" && leave_mark "" ""; } || die "cannot make the directory '$venv' (VENV)"
"$python" -m venv --clear "$venv" || die "'$python -m venv' failed (its reason is above)"
leave_mark "" ""
cp constraints.txt "$venv/constraints.txt"
pip_install pip
case $torch in
cpu) requirement="torch --index-url https://download.pytorch.org/whl/cpu" ;;
"")
    requirement=torch
    command -v nvidia-smi >/dev/null ||
        say "no GPU found (no nvidia-smi): torch brings gigabytes of CUDA libraries with it; to avoid that, stop and run: make venv TORCH=cpu"
    ;;
*)
    requirement=$torch # the pins give way to it, and to the triton that belongs to it
    sed -i -E '/^(torch|torchaudio|triton)==/d' "$venv/constraints.txt"
    ;;
esac
say "installing $requirement"
# shellcheck disable=SC2086 # options of pip beside the requirement
pip_install $requirement
"$venv/bin/python" -m pip freeze | grep '^torch==' >>"$venv/constraints.txt" || true
say "building fairseq (a minute or two)"
pip_install numpy cython setuptools wheel
pip_install --no-build-isolation fairseq-fixed
say "installing pn_fairseq and its tools"
install_this -e '.[fairseq,test]'
say "done; activate it with: . $venv/bin/activate"
