#!/usr/bin/env bash
# Tables 2 and 4 of the paper, PTB: the tensorized transformer, but causal (docs/language_modeling.md).
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce ptb "$@"
