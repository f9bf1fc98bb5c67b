#!/usr/bin/env bash
# BLEU and chrF of the hypotheses of a run, and whether runs differ significantly (pn_fairseq/pipeline/score.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb score "$@"
