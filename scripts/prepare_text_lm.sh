#!/usr/bin/env bash
# `pn prepare text_lm` in the project's environment; pn_fairseq/pipeline/data/recipes/text_lm.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare text_lm "$@"
