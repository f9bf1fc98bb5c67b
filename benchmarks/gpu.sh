#!/usr/bin/env bash
# Measure on a machine that has a GPU and PyTorch, but perhaps no internet, no fairseq and little time.
#   benchmarks/gpu.sh --download 3.12   with internet: fetch what such a machine lacks for its Python 3.12 into wheels/
#   benchmarks/gpu.sh --out DIR         there, in a copy of this checkout: install wheels/ into a temporary folder, print
#                                       versions and what is missing, then run `python -m benchmarks.gpu --out DIR`
# Further options go to benchmarks.gpu. DIR/compiled.tar.gz receives the compiled kernels. In the root of the checkout it
# saves the next call, on a machine with the same versions, the time to compile them.
#   PYTHON=python3            the interpreter that has PyTorch
#   WHEELS=wheels             the folder of wheels
#   COMPILED=compiled.tar.gz  compiled kernels of an earlier call
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
python=${PYTHON:-python3} wheels=${WHEELS:-wheels} compiled=${COMPILED:-compiled.tar.gz}
say() { echo "[gpu.sh] $*" >&2; }
die() { echo "gpu.sh: error: $*" >&2 && exit 2; }
[[ ${1-} != --help ]] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit; }

# What PyTorch's image of a GPU machine usually lacks. antlr4 comes as source only, and is the same for every Python.
download() {
    local platform platforms=()
    for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${platform}_x86_64")
    done
    mapfile -t pinned < <(sed -n '/^\(fairseq-fixed\|hydra-core\|omegaconf\)==/p' constraints.txt)
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

if [[ ${1-} == --download ]]; then
    [[ ${2-} =~ ^3\.[0-9]+$ && $# -eq 2 ]] || die "--download needs the Python of the GPU's machine, such as 3.12"
    download "$2"
    exit
fi
out=
arguments=("$@")
for ((place = 0; place < $#; place++)); do
    [[ ${arguments[place]} != --out ]] || out=${arguments[place + 1]-}
    [[ ${arguments[place]} != --out=* ]] || out=${arguments[place]#--out=}
done
[[ -n $out ]] || die "--out DIR is missing (see --help)"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
shopt -s nullglob
carried=("$wheels"/*.whl)
if ((${#carried[@]})); then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$scratch/site" \
        "${carried[@]}" >&2 || die "pip cannot install the wheels in '$wheels' (the reason is above)"
fi
export PYTHONPATH=$PWD:$scratch/site${PYTHONPATH:+:$PYTHONPATH}
found=$(packages torch triton numpy pandas matplotlib fairseq-fixed hydra-core omegaconf antlr4-python3-runtime bitarray \
    torchaudio sacrebleu scikit-learn regex tqdm)
say "${found//$'\n'/, }"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >&2 || say "there is no nvidia-smi"
for name in torch numpy pandas; do
    [[ $found != *"$name missing"* ]] || die "$name is missing: put its wheel into '$wheels'"
done

mkdir -p "$scratch/compiled" "$out"
if [[ -e $compiled ]]; then
    tar -xzf "$compiled" -C "$scratch/compiled" || die "'$compiled' is not an archive of compiled kernels"
    say "uses the kernels in $compiled"
fi
export TRITON_CACHE_DIR=$scratch/compiled/triton TORCHINDUCTOR_CACHE_DIR=$scratch/compiled/inductor
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
code=0
"$python" -m benchmarks.gpu "$@" || code=$?
tar -czf "$out/compiled.tar.gz" -C "$scratch/compiled" .
exit "$code"
