#!/usr/bin/env bash
# Measure and train on a machine that has a GPU and PyTorch, but perhaps no internet, no fairseq and little time.
#   benchmarks/gpu.sh download 3.12             with internet: fetch what such a machine lacks for its Python 3.12
#   benchmarks/gpu.sh measure OUT SECONDS ...   there: `python -m benchmarks.gpu --out OUT ...`
#   benchmarks/gpu.sh train OUT SECONDS LIST    there: `benchmarks/gpu_runs.sh LIST OUT ...`
# `measure` and `train` run in a copy of this checkout. They first install the wheels into a temporary folder, print
# versions and what is missing, and compile the C++ kernels; SECONDS is the time for all of this, and a call is over at
# most half a minute later. OUT/compiled.tar.gz receives the compiled kernels. In the root of the checkout, this file
# saves a machine with the same versions the time to compile them.
#   PYTHON=python3                   the interpreter that has PyTorch
#   WHEELS=wheels                    the folder of wheels
#   COMPILED=compiled.tar.gz         compiled kernels of an earlier call
set -euo pipefail
shopt -s nullglob
SECONDS=0
cd "$(dirname "$(readlink -f "$0")")/.."
python=${PYTHON:-python3} wheels=${WHEELS:-wheels} compiled=${COMPILED:-compiled.tar.gz}
say() { echo "[gpu.sh] $*" >&2; }
die() { echo "gpu.sh: error: $*" >&2 && exit 2; }

# What PyTorch's image of a GPU machine usually lacks. antlr4 comes as source only, and is the same for every Python.
pins='\(fairseq-fixed\|hydra-core\|omegaconf\|langcodes\|sacremoses\|subword-nmt\|tensorboardX\)'
download() {
    local platform platforms=()
    for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${platform}_x86_64")
    done
    mapfile -t pinned < <(sed -n "/^$pins==/p" constraints.txt)
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" --implementation cp \
        --python-version "$1" "${platforms[@]}" "${pinned[@]}" bitarray
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" 'antlr4-python3-runtime==4.9.*'
    say "$wheels has $(find "$wheels" -name '*.whl' | wc -l) wheels ($(du -sh "$wheels" | cut -f1))"
}

# The versions of the packages that are there, and the names of the others.
packages() {
    "$python" - "$@" <<'END'
import sys
from importlib import metadata

print("python", sys.version.split()[0])
for name in sys.argv[1:]:
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "missing")
END
}

install() {
    local carried=("$wheels"/*.whl) found name
    if ((${#carried[@]})); then
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
            --target "$scratch/site" "${carried[@]}" >&2 ||
            die "pip cannot install the wheels in '$wheels' (the reason is above)"
    fi
    export PYTHONPATH=$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}
    found=$(packages torch triton numpy pandas setuptools matplotlib fairseq-fixed hydra-core omegaconf \
        antlr4-python3-runtime bitarray torchaudio sacrebleu scikit-learn regex tqdm langcodes sacremoses subword-nmt \
        tensorboardX)
    say "${found//$'\n'/, }"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >&2 || say "there is no nvidia-smi"
    for name in torch numpy pandas; do
        [[ $found != *"$name missing"* ]] || die "$name is missing: put its wheel into '$wheels'"
    done
}

# Triton and inductor note the absolute paths of what they compiled, so their folder is the same in every call.
kernels=${TMPDIR:-/tmp}/pn_fairseq_compiled_$(id -u)
package=pn_fairseq/kernels
# The C++ kernels that were compiled from these sources.
libraries=$kernels/cpp_$(cat $package/cpp/* setup.py | sha256sum | cut -c1-12)

unpack() {
    mkdir -p "$kernels"
    chmod 700 "$kernels" || die "'$kernels' belongs to somebody else"
    if [[ -e $compiled ]]; then
        if tar -xzf "$compiled" -C "$kernels"; then
            say "uses the kernels in $compiled"
        else
            say "goes on without '$compiled', which is not a whole archive of compiled kernels"
        fi
    fi
    export TRITON_CACHE_DIR=$kernels/triton TORCHINDUCTOR_CACHE_DIR=$kernels/inductor
}

# Compile the C++ kernels, unless they are there and no older than their sources.
compile_cpp() {
    local library
    for library in "$package"/_cpp_*.so; do
        [[ -z $(find "$package/cpp" -newer "$library" -print -quit) ]] || rm "$library"
    done
    for library in "$libraries"/*.so; do
        cp "$library" "$package"
    done
    if ! loads; then
        say "compiles the C++ kernels"
        "$python" setup.py --quiet build_ext --inplace --build-temp "$scratch/objects" --build-lib "$scratch/library" \
            >"$scratch/cpp.log" 2>&1 || true
        loads || say "goes on without the C++ kernels: $(tail -n 1 "$scratch/cpp.log")"
    fi
    mkdir -p "$libraries"
    for library in "$package"/_cpp_*.so; do
        cp "$library" "$libraries"
    done
}

# Whether the C++ kernels are there and fit this torch.
loads() {
    PN_FAIRSEQ_KERNELS=cpp "$python" -c 'import pn_fairseq.kernels' 2>/dev/null
}

# Pack the compiled kernels. A launch needs the binary of a Triton kernel, but none of its intermediate forms.
pack() {
    local archive=$out/compiled.tar.gz
    if tar -czf "$archive.partial" -C "$kernels" --exclude='triton/*/*.ttir' --exclude='triton/*/*.ttgir' \
        --exclude='triton/*/*.llir' --exclude='triton/*/*.ptx' --exclude='triton/*/*.source' .; then
        mv "$archive.partial" "$archive"
        say "$archive has $(du -h "$archive" | cut -f1)"
    else
        say "the compiled kernels could not be packed"
    fi
}

what=${1---help}
case $what in
    --help | -h)
        sed -n '2,/^set/s/^# \?//p' "$0" | sed '$d'
        exit
        ;;
    download)
        [[ ${2-} =~ ^3\.[0-9]+$ && $# -eq 2 ]] || die "download needs the Python of the GPU's machine, such as 3.12"
        download "$2"
        exit
        ;;
    measure | train) ;;
    *) die "expected download, measure or train (see --help), not '$what'" ;;
esac
[[ $# -ge 3 && $3 =~ ^[1-9][0-9]*$ ]] || die "expected $what OUT SECONDS (see --help)"
[[ $what == measure || ($# -eq 4 && -f ${4-}) ]] || die "train needs a file with a list (see --help)"
out=$2 total=$3
shift 3
mkdir -p "$out"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
install
unpack
compile_cpp
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# bash counts in SECONDS since this script began. What follows starts, ends and packs its results in the rest.
[[ $what == measure ]] && rest=20 || rest=60
left=$((total - SECONDS - rest))
((left > 0)) || die "nothing of $total seconds is left after $SECONDS"
say "begins after $SECONDS of $total seconds"
code=0
if [[ $what == measure ]]; then
    "$python" -m benchmarks.gpu --out "$out" --seconds "$left" "$@" || code=$?
else
    mkdir "$scratch/bin"
    printf '#!/bin/sh\nexec "%s" -m pn_fairseq "$@"\n' "$python" >"$scratch/bin/pn"
    chmod +x "$scratch/bin/pn"
    PN=$scratch/bin/pn benchmarks/gpu_runs.sh "$1" "$out" "$left" || code=$?
fi
pack
exit "$code"
