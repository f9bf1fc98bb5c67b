#!/usr/bin/env bash
# WMT14 English-German, as in Table 1 of Shen et al. 2020, from the archives to the table beside the paper's.
set -euo pipefail

config=wmt14_en_de_big
size=wmt_en_de_big
prepare=prepare_wmt14.sh
default_seeds="1"
tables="powernorm-1-wmt14"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
