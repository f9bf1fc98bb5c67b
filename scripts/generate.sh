#!/usr/bin/env bash
# Translate a subset with the model of a run.
set -euo pipefail

usage() {
    cat <<'END'
usage: scripts/generate.sh --run DIR [--checkpoint FILE] [--subset test] [--beam N] [--lenpen X] [--output DIR]
                           [--batch-size N] [--max-tokens N] [--fp16 | --no-fp16]

  --run DIR          a run of scripts/train.sh
  --checkpoint FILE  default DIR/checkpoints/averaged.pt (scripts/average.sh makes it)
  --subset NAME      test (default) or valid
  --beam, --lenpen   beam size and length penalty (default: the run's configuration)
  --output DIR       default DIR/generate/SUBSET; gets hyp.tok (one hypothesis a line, in the order of the text),
                     ref.tok, src.tok and fairseq's own output in generate.log
  --batch-size N     sentences (default 128) and
  --max-tokens N     source tokens with their padding (default 8000) in a batch, whichever is reached first; fewer if
                     the memory is too small
  --fp16, --no-fp16  half precision, on a GPU only (default: as the run was trained)

Decodes on all visible GPUs, one process on each (or on NPROC=N of them; CUDA_VISIBLE_DEVICES=0,1 names some), or else
with NPROC=N processes on the CPU (default 1). As many hypotheses come out as sentences go in, or the script fails. Does nothing if the output
was made from this checkpoint and this data with these settings.
END
}

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
# shellcheck source=lib/run.sh
source "$root/scripts/lib/run.sh"

run=""
options=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --run) option_value "$1" $#; run=$2; shift 2 ;;
    --checkpoint | --subset | --beam | --lenpen | --output | --batch-size | --max-tokens)
        option_value "$1" $#
        options+=("$1=$2")
        shift 2
        ;;
    --fp16 | --no-fp16) options+=("$1"); shift ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument '$1' (see --help)" ;;
    esac
done
use_venv
need python fairseq-generate
check_run "$run"
check_same_data "$run"
cpu_allocator
# In place of this shell, so that a signal to it reaches what ends the processes.
exec python "$root/scripts/lib/decode.py" "$run" "$root/pn_fairseq" ${options[@]+"${options[@]}"}
