#!/usr/bin/env bash
# IWSLT14 German-English, as in Table 1 of Shen et al. 2020, from the archive to the table beside the paper's.
set -euo pipefail

config=iwslt14_de_en
size=iwslt
prepare=prepare_iwslt14.sh
default_seeds="1 2 3"
tables="powernorm-1 powernorm-4 adanorm-1 adanorm-2 adanorm-3 adanorm-4"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
