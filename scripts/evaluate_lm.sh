#!/usr/bin/env bash
# The perplexity of a language model (pn_fairseq/pipeline/evaluate_lm.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb evaluate-lm "$@"
