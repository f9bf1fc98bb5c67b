#!/usr/bin/env bash
# The perplexity of a language model: pn evaluate-lm.
exec bash "$(dirname "$(readlink -f "$0")")/pn" evaluate-lm "$@"
