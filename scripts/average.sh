#!/usr/bin/env bash
# Average the last checkpoints of a run (pn_fairseq/pipeline/average.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb average "$@"
