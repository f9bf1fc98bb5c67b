#!/usr/bin/env bash
# The perplexity of a language model: pn evaluate-lm (pn_fairseq/pipeline/evaluate_lm.py).
exec bash "$(dirname "$(readlink -f "$0")")/pn" evaluate-lm "$@"
