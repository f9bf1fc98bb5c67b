#!/usr/bin/env bash
# WMT14 English-German, as in Table 1 of Shen et al. 2020, from the archives to the table with the paper's numbers.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce wmt14 "$@"
