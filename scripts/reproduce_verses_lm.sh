#!/usr/bin/env bash
# The experiment on language models of the English verses in the repository, from the raw text to the report (pn_fairseq/pipeline/reproduce.py).
set -euo pipefail
# shellcheck source=lib/common.sh
source "$(dirname "$(readlink -f "$0")")/lib/common.sh"
run_verb reproduce verses_lm "$@"
