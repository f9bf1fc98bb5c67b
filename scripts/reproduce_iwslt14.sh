#!/usr/bin/env bash
# IWSLT14 German-English, as in Table 1 of Shen et al. 2020, from the archive to the table with the paper's numbers.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce iwslt14 "$@"
