#!/usr/bin/env bash
# Tables 2 and 4 of the paper, PTB: the tensorized transformer, but causal (docs/language_modeling.md).
set -euo pipefail

config=ptb_lm
size=ptb
models="tensorized_lm"
default_norms="ln gn bn brn mabn pnv pn"
prepare=prepare_ptb.sh
default_seeds="1"
after="average evaluate_lm"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
