#!/usr/bin/env bash
# Translate text from stdin or a file with the model of a run (pn_fairseq/pipeline/translate.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb translate "$@"
