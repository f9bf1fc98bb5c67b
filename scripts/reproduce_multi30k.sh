#!/usr/bin/env bash
# The four norms on Multi30k, captions of pictures; --corpus names the folder with its text.
set -euo pipefail

config=multi30k_de_en
size=tiny
prepare=prepare_multi30k.sh
default_seeds="1 2 3"
# shellcheck source=lib/reproduce.sh
source "$(dirname "$(readlink -f "$0")")/lib/reproduce.sh"
