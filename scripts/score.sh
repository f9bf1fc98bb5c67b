#!/usr/bin/env bash
# BLEU and chrF of the hypotheses of a run, and whether runs differ significantly (pn_fairseq/pipeline/score.py).
set -euo pipefail

root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
use_venv
need python
exec python -m pn_fairseq score "$@"
