#!/usr/bin/env bash
# BLEU and chrF of the hypotheses of a run, and whether runs differ significantly: pn-score.
set -euo pipefail
root=$(CDPATH='' cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# shellcheck source=lib/common.sh
source "$root/scripts/lib/common.sh"
use_venv
need python
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec python -m pn_fairseq score "$@"
